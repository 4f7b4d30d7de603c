"""Writing a checkpoint so that it is complete or not there at all.

It is written under a temporary name, flushed to the disk, read back, and renamed last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from gptscale.common.checkpoint.folders import make_private, remove_leftovers, retire, step_folders, temporary_name
from gptscale.common.checkpoint.manifest import BOXES_PER_FILE, DTYPES, dtype_name, sealed, sha256_of
from gptscale.common.engine import Engine
from gptscale.common.errors import GptscaleError, NumericError, StorageError
from gptscale.common.process.world import gather_objects
from gptscale.common.state import Box, Shard, box_of, holders, is_finite

# All tensors of a file are in host memory while it is written, so this bounds the memory that a save needs.
FILE_BYTES = 2**31


class Draft(NamedTuple):
    """A checkpoint that all ranks have agreed to write: its folders, and which rank writes which box.

    counters: of the engine, at this step. n_bytes: what this rank holds.
    """

    target: Path
    temporary: Path
    owners: dict[Box, int]
    n_bytes: int
    counters: dict[str, float]

    @classmethod
    def agreed(cls, engine: Engine, folder: Path, step: int) -> Draft:
        """Return what is to be written. Every rank calls it."""
        temporary = folder / str(gather_objects(temporary_name(f"step-{step}"))[0])
        # Decide here which rank writes which box, so that an engine need not know who else has a copy of its boxes. The state
        # is walked twice, once to list the boxes and once to write them: if it lives on disk, only a part is in memory at a
        # time.
        box_bytes = gather_objects({box_of(s): s.tensor.nbytes for s in engine.state() if s.tensor.numel()})
        n_bytes = sum(box_bytes[_rank()].values())
        return cls(folder / f"step-{step}", temporary, _owners(box_bytes), n_bytes, engine.counters())

    def own(self, engine: Engine) -> Iterator[Shard]:
        """Yield the shards that this rank writes."""
        rank = _rank()
        return (s for s in engine.state() if self.owners.get(box_of(s)) == rank)


def save(engine: Engine, folder: Path, step: int, facts: dict[str, Any], *, keep: int = 2) -> Path:
    """Write `folder`/step-N with the engine's whole state and `facts`, and delete all but the newest `keep` checkpoints.

    What killed saves left in `folder` is deleted too, so no other run may save there at the same time.
    Every rank calls it, and the failure of one is raised on all: StorageError, with the bytes needed and free, or
    NumericError if the state is not finite.
    """
    draft = Draft.agreed(engine, folder, step)
    return write(draft, map(on_host, draft.own(engine)), {"step": step, "counters": draft.counters, **facts}, keep=keep)


def on_host(shard: Shard) -> Shard:
    """Return a copy of a shard in host memory."""
    return shard._replace(tensor=shard.tensor.detach().to("cpu", copy=True).contiguous())


def write(
    draft: Draft,
    shards: Iterable[Shard],
    manifest: dict[str, Any],
    *,
    keep: int,
    gather: Callable[[Any], list[Any]] = gather_objects,
) -> Path:
    """Write the checkpoint of `draft` from the shards that this rank writes, which lie in host memory.

    Every rank calls it, and it raises as `save` does. gather: gathers an object of each rank.
    """
    folder, temporary, rank = draft.target.parent, draft.temporary, _rank()
    outcome: Any = None
    try:
        make_private(folder)
        make_private(temporary)
        if rank == 0:
            remove_leftovers(folder, but=temporary.name)
        outcome = list(_write_files(temporary, rank, shards))
    except (OSError, GptscaleError) as error:
        outcome = _as_gptscale_error(error, folder, draft.n_bytes)
    outcomes = gather(outcome)
    failures = [o for o in outcomes if isinstance(o, GptscaleError)]
    if not failures and rank == 0:
        try:
            _commit(temporary, draft.target, {**manifest, "files": [entry for part in outcomes for entry in part]})
        except OSError as error:
            failures = [_as_gptscale_error(error, folder, 0)]
    failures = [e for part in gather(failures) for e in part]
    if failures:
        shutil.rmtree(temporary, ignore_errors=True)
        raise failures[0]
    if rank == 0:
        for old in step_folders(folder)[keep:]:
            try:
                shutil.rmtree(retire(old), ignore_errors=True)
            except OSError as error:
                # A folder that cannot be deleted costs space and not the run.
                print(f"gptscale: warning: {old.name} is not deleted ({error.strerror}), in {folder}", flush=True)
    return draft.target


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _owners(box_bytes: list[dict[Box, int]]) -> dict[Box, int]:
    """Return the rank that writes each box: of the ranks that have it, the one with the fewest bytes so far."""
    load, owners = [0] * len(box_bytes), {}
    for box, ranks in holders(box_bytes).items():
        owner = min(ranks, key=lambda r: (load[r], r))
        load[owner] += box_bytes[owner][box]
        owners[box] = owner
    return owners


def _write_files(folder: Path, rank: int, shards: Iterable[Shard]) -> Iterator[dict[str, Any]]:
    """Write this rank's boxes to files of bounded size, and yield each file's entry in the manifest."""
    for index, group in enumerate(groups(shards)):
        tensors = {f"{s.name}@{','.join(map(str, s.offset))}": s.tensor for s in group}
        for key, tensor in tensors.items():
            if not is_finite(tensor):
                what = f"{key.split('@')[0]} holds NaN or Inf"
                raise NumericError(what, "while saving", "resume from the checkpoint before")
        name, digest, size = f"rank-{rank:05d}-{index:04d}.safetensors", hashlib.sha256(), 0
        with open_durably(folder / name) as file:
            for piece in _safetensors(tensors):
                digest.update(piece)
                size += file.write(piece)
        if sha256_of(folder / name) != digest.hexdigest():
            raise StorageError(f"{name} reads back differently from what was written", f"in {folder}", "check the disk")
        boxes = [
            {"name": s.name, "key": key, "dtype": dtype_name(s.tensor.dtype)}
            | {"offset": s.offset, "shape": tuple(s.tensor.shape), "whole": s.shape}
            for key, s in zip(tensors, group, strict=True)
        ]
        yield {"file": name, "size": size, "sha256": digest.hexdigest(), "boxes": boxes}


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes that safetensors.torch.save makes of tensors in host memory, without a copy of them.

    Nothing here holds Python's lock for long, so that training goes on beside it.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in ordered.values():
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


def groups(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Yield the shards in lists of at most FILE_BYTES and BOXES_PER_FILE."""
    group: list[Shard] = []
    size = 0
    for shard in shards:
        if group and (size + shard.tensor.nbytes > FILE_BYTES or len(group) == BOXES_PER_FILE):
            yield group
            group, size = [], 0
        group.append(shard)
        size += shard.tensor.nbytes
    if group:
        yield group


def _commit(temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
    with open_durably(temporary / "manifest.json") as file:
        file.write(sealed(manifest))
    _sync_folder(temporary)
    # The same step may have been saved before.
    replaced = retire(target) if target.exists() else None
    os.rename(temporary, target)
    _sync_folder(target.parent)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def open_durably(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, private to the user, and wait at the end until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_gptscale_error(error: Exception, folder: Path, needed: int) -> GptscaleError:
    if isinstance(error, GptscaleError):
        return error
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    why = getattr(error, "strerror", None) or error
    what = f"checkpoint not written: {why} (rank needs {needed:,} bytes, {free:,} free)"
    return StorageError(what, f"in {folder}", "free space or point --out elsewhere")
