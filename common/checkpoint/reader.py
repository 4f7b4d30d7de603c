"""Reading checkpoints that any recipe can resume from: named tensors in safetensors files, and a manifest of them.

    step-300/manifest.json            step, counters, workload, SHA-256 and size of each file, position of each box
    step-300/rank-00000-0000.safetensors ...

A tensor is stored as the boxes in which the ranks held it. A reader can ask for any other box, so a run that was saved on 4
shards loads on 2, or on one process. There is no pickle, and a run reads no tensor from a file before the file's hash agreed.
Writing is in common/checkpoint/writer.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptscale.common.engine import Engine
from gptscale.common.errors import CheckpointError, GptscaleError
from gptscale.common.process.world import gather_objects
from gptscale.common.state import Shard

FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 2**28
STEP_FOLDER = re.compile(r"step-(\d{1,12})")
FIX = "resume from another checkpoint"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex, reading it in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def step_folders(folder: Path) -> list[Path]:
    """Return the finished checkpoints under `folder`, newest first."""
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir()]
    by_step = [(int(match.group(1)), path) for match, path in matches if match]
    return [path for _, path in sorted(by_step, reverse=True)]


def is_deepspeeds_own(folder: Path) -> bool:
    """Return whether DeepSpeed's own save_checkpoint wrote `folder`, judging by the names of its files."""
    # A file `latest` holds the name of the folder to read; without it, `folder` may itself be that folder.
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


class Reader:
    """One checkpoint: its facts, and any box of any of its tensors.

    The constructor checks the manifest and the files' sizes; `verify` checks their bytes. Both raise CheckpointError, which
    names the file and the difference.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path)
        self._boxes: dict[str, list[dict[str, Any]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            for entry in self.manifest["files"]:
                for box in entry["boxes"]:
                    self._boxes.setdefault(box["name"], []).append({**box, "file": entry["file"]})
                    self.shapes[box["name"]] = tuple(box["whole"])
        except (KeyError, TypeError) as error:
            raise self._damaged("manifest.json", f"lacks {error}") from None
        self._check_files()

    @property
    def step(self) -> int:
        """The number of optimizer steps done when this was saved."""
        return int(self.manifest["step"])

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._boxes)

    def _damaged(self, file: str, how: str) -> CheckpointError:
        return CheckpointError(f"{file} {how}", f"in checkpoint {self.path}", FIX)

    def _check_files(self) -> None:
        listed = {entry["file"]: entry for entry in self.manifest["files"]}
        present = {p.name for p in self.path.iterdir()} - {"manifest.json"}
        for name in sorted(listed.keys() ^ present):
            raise self._damaged(repr(name), "is missing" if name in listed else "is not in the manifest")
        for name, entry in listed.items():
            size = (self.path / name).stat().st_size
            if size != entry["size"]:
                raise self._damaged(name, f"has {size} bytes, expected {entry['size']}")

    def verify(self) -> Reader:
        """Compare the SHA-256 of every file with the manifest, and return this reader."""
        for entry in self.manifest["files"]:
            if sha256_of(self.path / entry["file"]) != entry["sha256"]:
                raise self._damaged(entry["file"], "does not match its SHA-256")
        return self

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return one box of tensor `name` on the CPU.

        The box begins at `offset` and has `shape`; by default it is the whole tensor. Raises CheckpointError if the saved
        boxes do not cover it.
        """
        import safetensors  # here, because a run without checkpoints never needs it

        if name not in self._boxes:
            raise self._damaged("the saved state", f"has no {name!r}")
        full_shape = self.shapes[name]
        offset, shape = offset or (0,) * len(full_shape), full_shape if shape is None else shape
        result: Tensor | None = None
        n_filled = 0
        for box in self._boxes[name]:
            begin = [max(a, b) for a, b in zip(offset, box["offset"], strict=True)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, box["offset"], box["shape"], strict=True)]
            if any(e <= b for b, e in zip(begin, end, strict=True)):
                continue
            with safetensors.safe_open(self.path / box["file"], framework="pt") as file:
                slices = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, box["offset"], strict=True))
                # A tensor of no dims cannot be sliced.
                part = file.get_slice(box["key"])[slices] if slices else file.get_tensor(box["key"])
            result = torch.empty(shape, dtype=part.dtype) if result is None else result
            result[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offset, strict=True))] = part
            n_filled += part.numel()
        if result is None or n_filled != math.prod(shape):
            raise self._damaged(f"tensor {name!r}", f"covers {n_filled} of {math.prod(shape)} wanted elements")
        return result

    def load_into(self, engine: Engine) -> None:
        """Fill the engine's state from this checkpoint.

        Every rank calls it, and the failure of one is raised on all. Raises CheckpointError if a tensor is missing here, is
        not wanted by any rank, or has another shape.
        """
        names: set[str] = set()
        failure: CheckpointError | None = None
        try:
            for shard in engine.state():
                names.add(shard.name)
                self._fill(shard)
        except CheckpointError as error:
            failure = error
        outcomes = gather_objects((names, failure))
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            raise failures[0]
        run_names = set().union(*(names for names, _ in outcomes))
        if different := sorted(run_names ^ set(self.names())):
            raise self._damaged("the saved state", f"and the run's differ in {different}"[:300])
        engine.load_counters(self.manifest["counters"])

    @torch.no_grad()
    def _fill(self, shard: Shard) -> None:
        saved = self.shapes.get(shard.name, shard.shape)
        if saved != shard.shape:
            raise self._damaged(repr(shard.name), f"has shape {saved}, the run's is {shard.shape}")
        if shard.tensor.numel():
            shard.tensor.copy_(self.read(shard.name, shard.offset, tuple(shard.tensor.shape)))


def _read_manifest(path: Path) -> dict[str, Any]:
    where = f"in checkpoint {path}"
    file = path / "manifest.json"
    if not file.is_file():
        raise CheckpointError("manifest.json is missing", where, FIX)
    if not 0 < file.stat().st_size <= MANIFEST_BYTES_MAX:
        raise CheckpointError(f"manifest.json has {file.stat().st_size} bytes", where, FIX)
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"manifest.json is no JSON ({type(error).__name__})", where, FIX) from None
    types = {"format_version": int, "step": int, "counters": dict, "files": list, "workload": dict}
    for key, kind in types.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"manifest.json has no valid {key!r}", where, FIX)
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"format version {manifest['format_version']} is unknown", where, f"this package reads {FORMAT_VERSION}"
        )
    for entry in manifest["files"]:
        if not isinstance(entry, dict) or not re.fullmatch(r"rank-\d{5}-\d{4}\.safetensors", str(entry.get("file"))):
            raise CheckpointError("manifest.json names a file that is none of a checkpoint's", where, FIX)
    return manifest


def agreed(path: Path, check: Callable[[Reader], None], *, is_main: bool) -> Reader:
    """Return the checkpoint from which the run continues, the same one on every rank.

    It is `path` itself, or the newest one under `path` that verifies. Rank 0 looks for it and calls `check` with it; an error
    of either is raised on every rank. A `path` that is a checkpoint was verified before the run.
    """
    outcome: str | GptscaleError | None = None
    if is_main:
        try:
            reader = Reader(path) if (path / "manifest.json").exists() else newest_valid(path)
            check(reader)
            outcome = str(reader.path)
        except GptscaleError as error:
            outcome = error
    outcome = gather_objects(outcome)[0]
    if isinstance(outcome, GptscaleError):
        raise outcome
    return Reader(Path(str(outcome)))


def newest_valid(folder: Path, say: Any = print) -> Reader:
    """Return the newest checkpoint under `folder` that verifies.

    One that does not is renamed to step-N.corrupt, never deleted. Call it on one process, and tell the others the path.
    Raises CheckpointError if no checkpoint verifies.
    """
    for path in step_folders(folder):
        try:
            return Reader(path).verify()
        except CheckpointError as error:
            aside = path.with_name(f"{path.name}.corrupt")
            os.rename(path, aside if not aside.exists() else aside.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}"))
            say(
                f"gptscale: warning: {error.what}, in {path}, set aside as {aside.name}, falling back to the one before"
            )
    raise CheckpointError(
        "no checkpoint that verifies", f"in {folder}", "start anew without --resume, or give --resume PATH"
    )
