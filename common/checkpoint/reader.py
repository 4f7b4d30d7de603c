"""Reading checkpoints that any recipe can resume from: named tensors in safetensors files, and a manifest of them.

    step-300/manifest.json            step, counters, workload, SHA-256 and size of each file, position of each box
    step-300/rank-00000-0000.safetensors ...

A tensor is stored as the boxes in which the ranks held it. A reader can ask for any other box, so a run that was saved on 4
shards loads on 2, or on one process. There is no pickle, and a run reads no tensor from a file before the file's hash agreed.
Writing is in common/checkpoint/writer.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptscale.common.checkpoint.folders import set_aside, step_folders
from gptscale.common.checkpoint.manifest import check_header, damaged, read_manifest, reading, sha256_of
from gptscale.common.engine import Engine
from gptscale.common.errors import CheckpointError, GptscaleError
from gptscale.common.process.world import gather_objects
from gptscale.common.state import Shard, is_finite


class Reader:
    """One checkpoint: its facts, and any box of any of its tensors.

    shapes: of all tensors, by their names. The constructor checks the manifest and the files' sizes; `verify` checks their bytes.
    Both raise CheckpointError, which names the file and the difference, and StorageError if the files cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._boxes: dict[str, list[dict[str, Any]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        with reading(path):
            self.manifest = read_manifest(path)
            self._check_files()
        for entry in self.manifest["files"]:
            for box in entry["boxes"]:
                self._boxes.setdefault(box["name"], []).append({**box, "file": entry["file"]})
                self.shapes[box["name"]] = tuple(box["whole"])

    @property
    def step(self) -> int:
        """The number of optimizer steps done when this was saved."""
        return int(self.manifest["step"])

    def _damaged(self, file: str, how: str) -> CheckpointError:
        return damaged(self.path, file, how)

    def _check_files(self) -> None:
        listed = {entry["file"]: entry for entry in self.manifest["files"]}
        present = {p.name for p in self.path.iterdir()} - {"manifest.json"}
        for name in sorted(listed.keys() ^ present):
            raise self._damaged(repr(name), "is missing" if name in listed else "is not in the manifest")
        for name, entry in listed.items():
            # A pipe under this name would hang whoever opens it.
            if not (self.path / name).is_file():
                raise self._damaged(name, "is no file")
            size = (self.path / name).stat().st_size
            if size != entry["size"]:
                raise self._damaged(name, f"has {size} bytes, expected {entry['size']}")
            check_header(self.path, entry)

    def verify(self) -> Reader:
        """Compare the SHA-256 of every file with the manifest, check that all numbers are finite, and return this reader."""
        for entry in self.manifest["files"]:
            with reading(self.path):
                import safetensors

                if sha256_of(self.path / entry["file"]) != entry["sha256"]:
                    raise self._damaged(entry["file"], "does not match its SHA-256")
                with safetensors.safe_open(self.path / entry["file"], framework="pt") as file:
                    for box in entry["boxes"]:
                        if not is_finite(file.get_tensor(box["key"])):
                            raise self._damaged(f"tensor {box['name']!r}", "holds NaN or Inf")
        return self

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return one box of tensor `name` on the CPU.

        The box begins at `offset` and has `shape`; by default it is the whole tensor. Raises CheckpointError if the saved
        boxes do not cover it.
        """
        with reading(self.path):
            # A run without checkpoints never needs it.
            import safetensors

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
            with reading(self.path), safetensors.safe_open(self.path / box["file"], framework="pt") as file:
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
        failure: GptscaleError | None = None
        try:
            for shard in engine.state():
                names.add(shard.name)
                self._fill(shard)
        except GptscaleError as error:
            failure = error
        outcomes = gather_objects((names, failure))
        _raise_first([failure for _, failure in outcomes])
        run_names = set().union(*(names for names, _ in outcomes))
        if different := sorted(run_names ^ self.shapes.keys()):
            raise self._damaged("the saved state", f"and the run's differ in {different}"[:300])
        try:
            engine.load_counters(self.manifest["counters"])
        except KeyError as error:
            raise self._damaged("the saved state", f"has no counter {error}") from None

    @torch.no_grad()
    def _fill(self, shard: Shard) -> None:
        saved = self.shapes.get(shard.name, shard.shape)
        if saved != shard.shape:
            raise self._damaged(repr(shard.name), f"has shape {saved}, the run's is {shard.shape}")
        if shard.tensor.numel():
            shard.tensor.copy_(self.read(shard.name, shard.offset, tuple(shard.tensor.shape)))


def _raise_first(failures: list[GptscaleError | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise failure


def agreed(path: Path, check: Callable[[Reader], None], *, is_main: bool) -> Reader:
    """Return the checkpoint from which the run continues, the same one on every rank.

    It is `path` itself, or the newest one under `path` that verifies. Rank 0 looks for it and calls `check` with it; an error
    of either is raised on every rank. A `path` that is a checkpoint was verified before the run.
    """
    chosen: Path | None = None
    failure: GptscaleError | None = None
    if is_main:
        try:
            reader = Reader(path) if (path / "manifest.json").exists() else newest_valid(path)
            check(reader)
            chosen = reader.path
        except GptscaleError as error:
            failure = error
    chosen, failure = gather_objects((chosen, failure))[0]
    _raise_first([failure])
    try:
        reader = Reader(Path(str(chosen)))
    except GptscaleError as error:
        # This rank does not see what rank 0 sees, for example on a machine without the shared disk.
        failure = error
    _raise_first(gather_objects(failure))
    return reader


def newest_valid(folder: Path, say: Any = print) -> Reader:
    """Return the newest checkpoint under `folder` that verifies.

    One that does not is renamed to step-N.corrupt, never deleted. Call it on one process, and tell the others the path.
    Raises CheckpointError if no checkpoint verifies, and StorageError, with nothing renamed, if one cannot be read.
    """
    for path in step_folders(folder):
        try:
            return Reader(path).verify()
        except CheckpointError as error:
            aside = set_aside(path, "corrupt").name
            say(f"gptscale: warning: {error.what}, in {path}, set aside as {aside}, falling back to the one before")
    what = "no checkpoint that verifies"
    raise CheckpointError(what, f"in {folder}", "start anew without --resume, or give --resume PATH")


def newest_readable(folder: Path) -> Reader | None:
    """Return the newest checkpoint under `folder` with a sound manifest, or None if there is none.

    The bytes of its files are not read, so that this is cheap, and nothing is set aside.
    """
    for path in step_folders(folder):
        with contextlib.suppress(CheckpointError):
            return Reader(path)
    return None
