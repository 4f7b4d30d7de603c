"""Save checkpoints behind the training, which waits only while the state is copied. Hashing, writing and renaming follow."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptscale.common.checkpoint.writer import Draft, write
from gptscale.common.engine import Engine
from gptscale.common.process.world import agree_any, gather_objects
from gptscale.common.state import Shard

# A tenth of the weight of a thread of the training.
NICENESS = 10


class BackgroundSave:
    """The one save that may be under way. Every rank makes the same calls at the same steps."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def under_way(self) -> bool:
        """Whether a save has begun whose outcome nobody has asked for."""
        return self._thread is not None

    def begin(self, engine: Engine, folder: Path, step: int, facts: dict[str, Any], *, keep: int) -> None:
        """Copy this rank's part of the state aside, and write it behind the training, as `writer.save` would."""
        assert not self.under_way
        if dist.is_initialized() and self._group is None:
            # The ranks must agree on the outcome while the training uses the other groups.
            self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        draft = Draft.agreed(engine, folder, step)
        shards = [_aside(shard) for shard in draft.own(engine)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        manifest = {"step": step, "counters": draft.counters, **facts}
        self._failure = None
        self._thread = threading.Thread(
            target=self._write, args=(draft, shards, manifest, keep), name="gptscale-save", daemon=True
        )
        self._thread.start()

    def _write(self, draft: Draft, shards: list[Shard], manifest: dict[str, Any], keep: int) -> None:
        # Leave the processors to the steps where there are not enough. While the run waits for the save, they are free. Linux
        # gives each thread a niceness of its own.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            write(draft, shards, manifest, keep=keep, gather=lambda value: gather_objects(value, self._group))
        except BaseException as error:
            # Told by `finish`, in the thread that can act on it.
            self._failure = error

    def is_done(self) -> bool:
        """Return whether all ranks are done with it."""
        assert self._thread is not None
        return not agree_any(self._thread.is_alive())

    def finish(self) -> None:
        """Wait for its end, and raise what it failed with, on every rank alike."""
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure


def _aside(shard: Shard) -> Shard:
    """Return a copy of a shard in host memory, which a copy from a GPU may still be filling."""
    tensor = shard.tensor.detach()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return shard._replace(tensor=copy.copy_(tensor, non_blocking=True))
