"""Checkpoints that any recipe can read: boxes of named tensors in safetensors files, and a manifest that proves them.

    step-300/manifest.json            step, counters, workload, SHA-256 and size of each file, where each box lies
    step-300/rank-00000-0000.safetensors ...

A tensor is stored as the boxes in which the ranks held it; reading asks for any other box, so a run saved on 4 shards loads
on 2, or whole. There is no pickle, and nothing is read before its hash agreed. Writing is in checkpoint_writer.py.
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

import safetensors
import torch
from torch import Tensor

from gptscale.common.engine import Engine
from gptscale.common.errors import CheckpointError, GptscaleError
from gptscale.common.process.world import gather_objects
from gptscale.common.state import Shard

FORMAT_VERSION = 1
MANIFEST_BYTES_MAX = 2**28
STEP_FOLDER = re.compile(r"step-(\d{1,12})")


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    while piece := file.read(2**20):
        digest.update(piece)
    return digest.hexdigest()


def step_folders(folder: Path) -> list[Path]:
    """The committed checkpoints under `folder`, newest first."""
    found = [(int(m.group(1)), p) for p in folder.glob("step-*") if (m := STEP_FOLDER.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found, reverse=True)]


def is_deepspeeds_own(folder: Path) -> bool:
    """Whether a folder is what DeepSpeed's save_checkpoint leaves: a file `latest` with the name of the folder to read."""
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


class Reader:
    """One checkpoint: its facts, and any box of any of its tensors. Opening checks the manifest; `verify` the bytes.

    Raises CheckpointError, naming the file and what differs.
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
        return int(self.manifest["step"])

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._boxes)

    def _damaged(self, file: str, how: str) -> CheckpointError:
        return CheckpointError(f"{file} {how}", f"in checkpoint {self.path}", "resume from another checkpoint")

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
        """Compare every file's SHA-256 with the manifest's; returns itself."""
        for entry in self.manifest["files"]:
            if sha256_of(self.path / entry["file"]) != entry["sha256"]:
                raise self._damaged(entry["file"], "does not match its SHA-256")
        return self

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """The box of `name` that begins at `offset` and has `shape` (both default to the whole tensor), on the CPU."""
        if name not in self._boxes:
            raise self._damaged("the saved state", f"has no {name!r}")
        whole = self.shapes[name]
        offset, shape = offset or (0,) * len(whole), whole if shape is None else shape
        result: Tensor | None = None
        filled = 0
        for box in self._boxes[name]:
            begin = [max(a, b) for a, b in zip(offset, box["offset"], strict=True)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, box["offset"], box["shape"], strict=True)]
            if any(e <= b for b, e in zip(begin, end, strict=True)):
                continue
            with safetensors.safe_open(self.path / box["file"], framework="pt") as file:
                piece = file.get_slice(box["key"])
                inside = tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, box["offset"], strict=True))
                part = piece[inside] if inside else file.get_tensor(box["key"])
            result = torch.empty(shape, dtype=part.dtype) if result is None else result
            result[tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, offset, strict=True))] = part
            filled += part.numel()
        if result is None or filled != math.prod(shape):
            raise self._damaged(f"tensor {name!r}", f"covers {filled} of {math.prod(shape)} wanted elements")
        return result

    def load_into(self, engine: Engine) -> None:
        """Fill the engine's state from this checkpoint; every rank calls it, and what fails on one is raised on all.

        Refuses state that is missing, left over, or of another shape.
        """
        names: set[str] = set()
        failure: CheckpointError | None = None
        try:
            for shard in engine.state():
                names.add(shard.name)
                self._fill(shard)
        except CheckpointError as error:
            failure = error
        told = gather_objects((names, failure))
        if failures := [f for _, f in told if f is not None]:
            raise failures[0]
        if different := sorted(set().union(*(n for n, _ in told)) ^ set(self.names())):
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
    where, fix = f"in checkpoint {path}", "resume from another checkpoint"
    file = path / "manifest.json"
    if not file.is_file():
        raise CheckpointError("manifest.json is missing", where, fix)
    if not 0 < file.stat().st_size <= MANIFEST_BYTES_MAX:
        raise CheckpointError(f"manifest.json has {file.stat().st_size} bytes", where, fix)
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"manifest.json is no JSON ({type(error).__name__})", where, fix) from None
    needed = {"format_version": int, "step": int, "counters": dict, "files": list, "workload": dict}
    for key, kind in needed.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"manifest.json has no valid {key!r}", where, fix)
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"format version {manifest['format_version']} is unknown", where, f"this package reads {FORMAT_VERSION}"
        )
    for entry in manifest["files"]:
        if not isinstance(entry, dict) or not re.fullmatch(r"rank-\d{5}-\d{4}\.safetensors", str(entry.get("file"))):
            raise CheckpointError("manifest.json names a file that is none of a checkpoint's", where, fix)
    return manifest


def agreed(path: Path, check: Callable[[Reader], None], *, is_main: bool) -> Reader:
    """The checkpoint that a run goes on from, the same on every rank: `path`, or the newest under it that verifies.

    Rank 0 looks, and `check`s it; what either raises is raised on every rank. An explicit path was verified before the run.
    """
    found: str | GptscaleError | None = None
    if is_main:
        try:
            reader = Reader(path) if (path / "manifest.json").exists() else newest_valid(path)
            check(reader)
            found = str(reader.path)
        except GptscaleError as error:
            found = error
    found = gather_objects(found)[0]
    if isinstance(found, GptscaleError):
        raise found
    return Reader(Path(str(found)))


def newest_valid(folder: Path, say: Any = print) -> Reader:
    """The newest checkpoint under `folder` that verifies; those that do not are renamed step-N.corrupt, never deleted.

    For one process: the others are told its path. Raises CheckpointError if there is none.
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
