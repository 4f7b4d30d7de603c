"""Writing a checkpoint so that it is complete or not there at all.

It is written under a temporary name, flushed to the disk, read back, and renamed last.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from gptscale.common.checkpoint.folders import make_private, remove_leftovers, retire, step_folders, temporary_name
from gptscale.common.checkpoint.manifest import BOXES_PER_FILE, dtype_name, sealed
from gptscale.common.checkpoint.reader import sha256_of
from gptscale.common.engine import Engine
from gptscale.common.errors import GptscaleError, NumericError, StorageError
from gptscale.common.process.world import gather_objects
from gptscale.common.state import Shard

# All tensors of a file are in host memory while it is written, so this bounds the memory that a save needs.
FILE_BYTES = 2**31

Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # tensor name, offset, shape


def save(engine: Engine, folder: Path, step: int, facts: dict[str, Any], *, keep: int = 2) -> Path:
    """Write `folder`/step-N with the engine's whole state and `facts`, and delete all but the newest `keep` checkpoints.

    What killed saves left in `folder` is deleted too, so no other run may save there at the same time.
    Every rank calls it, and the failure of one is raised on all: StorageError, with the bytes needed and free, or
    NumericError if the state is not finite.
    """
    target, temporary = folder / f"step-{step}", folder / str(gather_objects(temporary_name(f"step-{step}"))[0])
    # Decide here which rank writes which box, so that an engine need not know who else has a copy of its boxes. The state is
    # walked twice, once to list the boxes and once to write them: if it lives on disk, only a part is in memory at a time.
    box_bytes = gather_objects({_box(s): s.tensor.nbytes for s in engine.state() if s.tensor.numel()})
    owners, rank = _owners(box_bytes), _rank()
    counters = engine.counters()
    outcome: Any = None
    try:
        make_private(folder)
        make_private(temporary)
        if rank == 0:
            remove_leftovers(folder, but=temporary.name)
        outcome = list(_write_files(temporary, rank, (s for s in engine.state() if owners.get(_box(s)) == rank)))
    except (OSError, GptscaleError) as error:
        outcome = _as_gptscale_error(error, folder, sum(box_bytes[rank].values()))
    outcomes = gather_objects(outcome)
    failures = [o for o in outcomes if isinstance(o, GptscaleError)]
    if not failures and rank == 0:
        try:
            files = [entry for part in outcomes for entry in part]
            _commit(temporary, target, {"step": step, "counters": counters, **facts, "files": files})
        except OSError as error:
            failures = [_as_gptscale_error(error, folder, 0)]
    failures = [e for part in gather_objects(failures) for e in part]
    if failures:
        shutil.rmtree(temporary, ignore_errors=True)
        raise failures[0]
    if rank == 0:
        _rotate(folder, keep)
    return target


def _rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints. What cannot be deleted costs space and not the run."""
    for old in step_folders(folder)[keep:]:
        try:
            shutil.rmtree(retire(old), ignore_errors=True)
        except OSError as error:
            print(f"gptscale: warning: {old.name} is not deleted ({error.strerror}), in {folder}", flush=True)


def _box(shard: Shard) -> Box:
    return shard.name, shard.offset, tuple(shard.tensor.shape)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _owners(box_bytes: list[dict[Box, int]]) -> dict[Box, int]:
    """Return the rank that writes each box: of the ranks that have it, the one with the fewest bytes so far."""
    holders: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(box_bytes):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
    load, owners = [0] * len(box_bytes), {}
    for box, ranks in holders.items():
        owner = min(ranks, key=lambda r: (load[r], r))
        load[owner] += box_bytes[owner][box]
        owners[box] = owner
    return owners


def _write_files(folder: Path, rank: int, shards: Iterable[Shard]) -> Iterator[dict[str, Any]]:
    """Write this rank's boxes to files of bounded size, and yield each file's entry in the manifest."""
    import safetensors.torch  # here, because a run without checkpoints never needs it

    for index, group in enumerate(_groups(shards)):
        tensors = {f"{s.name}@{','.join(map(str, s.offset))}": s.tensor for s in group}
        for key, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise NumericError(
                    f"{key.split('@')[0]} holds NaN or Inf", "while saving", "resume from the checkpoint before"
                )
        data = safetensors.torch.save(tensors)
        name, digest = f"rank-{rank:05d}-{index:04d}.safetensors", hashlib.sha256(data).hexdigest()
        write_durably(folder / name, data)
        if sha256_of(folder / name) != digest:
            raise StorageError(f"{name} reads back differently from what was written", f"in {folder}", "check the disk")
        boxes = [
            {
                "name": s.name,
                "key": key,
                "dtype": dtype_name(s.tensor.dtype),
                "offset": s.offset,
                "shape": tuple(s.tensor.shape),
                "whole": s.shape,
            }
            for key, s in zip(tensors, group, strict=True)
        ]
        yield {"file": name, "size": len(data), "sha256": digest, "boxes": boxes}


def _groups(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Yield copies of the shards in host memory, in lists of at most FILE_BYTES and BOXES_PER_FILE."""
    group: list[Shard] = []
    size = 0
    for shard in shards:
        if group and (size + shard.tensor.nbytes > FILE_BYTES or len(group) == BOXES_PER_FILE):
            yield group
            group, size = [], 0
        group.append(shard._replace(tensor=shard.tensor.detach().to("cpu", copy=True).contiguous()))
        size += shard.tensor.nbytes
    if group:
        yield group


def _commit(temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
    write_durably(temporary / "manifest.json", sealed(manifest))
    _sync_folder(temporary)
    # The same step may have been saved before.
    replaced = retire(target) if target.exists() else None
    os.rename(temporary, target)
    _sync_folder(target.parent)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file, private to the user, and wait until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
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
    return StorageError(
        f"checkpoint not written: {getattr(error, 'strerror', None) or error} (rank needs {needed:,} bytes, {free:,} free)",
        f"in {folder}",
        "free space or point --out elsewhere",
    )
