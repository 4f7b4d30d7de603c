"""How a process of a run ends: on request, out of memory, or by an error that the user can act on."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch

from gptscale.common.errors import (
    INTERRUPTED_EXIT_STATUS,
    PREEMPTED_EXIT_STATUS,
    DataError,
    GptscaleError,
    PeerError,
    StorageError,
    cannot_start,
    first_line,
)
from gptscale.common.process.roll_call import RefusedError

# The group of processes and the launcher may both pass on what was one Ctrl-C, or one SIGTERM.
SAME_REQUEST_S = 1.0
# Messages for memory that torch's allocator was not asked for: the CPU's, a CUDA context's, a library handle's
# (pytorch/pytorch#128601), Triton's.
OUT_OF_MEMORY_SIGNS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# Gloo's messages for a connection that a peer closed, and for one that gloo closed itself when a wait took too long. The second
# has no word of gloo where another collective had been waiting on the same connection.
MISSED_PEER_SIGNS = ("gloo", "Connection closed by peer", "Application timeout caused pair closure")


def report(
    error: BaseException, rank: int, missing: Callable[[], tuple[str, str] | None] = lambda: None
) -> tuple[BaseException, int]:
    """Print what ended the run, and return the error for the run's row and the exit status.

    missing: finds out, once a peer is missed, which rank it is and where it was last seen.
    An error that the user can act on is one line, which another rank may have printed, any other has its traceback. It is one
    write, so that ranks do not mix.
    """
    user_error = as_known(error)
    if isinstance(user_error, PeerError) and (who_and_where := missing()):
        who, where = who_and_where
        user_error = PeerError(user_error.what.replace("another rank", who, 1), where, user_error.fix)
    if isinstance(user_error, RefusedError) and user_error.is_said:
        return user_error, user_error.exit_status
    if user_error is not None:
        sys.stderr.write(f"gptscale: error: rank {rank}: {user_error}\n")
        return user_error, user_error.exit_status
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write(f"gptscale: error: rank {rank}: interrupted by SIGINT, before a step, start it again\n")
        return error, INTERRUPTED_EXIT_STATUS
    sys.stderr.write(f"{traceback.format_exc()}gptscale: error: rank {rank}: {error}\n")
    return error, 1


class StopRequest:
    """A flag that SIGTERM sets, as a scheduler sends it before it takes the machine, or SIGINT, which is Ctrl-C.

    The run looks at the flag between steps and saves. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._first = self._first or (number, time.monotonic())
        if time.monotonic() - self._first[1] > SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __call__(self) -> bool:
        return self._first is not None

    @property
    def exit_status(self) -> int:
        """The exit status of a run that stops on request, of this process or of another rank."""
        return INTERRUPTED_EXIT_STATUS if self._first and self._first[0] == signal.SIGINT else PREEMPTED_EXIT_STATUS


def as_known(error: BaseException) -> GptscaleError | None:
    """Return the error as one that the user can act on, or None if it is a defect that needs its traceback."""
    if isinstance(error, GptscaleError):
        return error
    text = str(error)
    if isinstance(error, SystemExit):
        called = traceback.extract_tb(error.__traceback__)[-1]
        what = f"the program ended itself by sys.exit({error.code!r})"
        return GptscaleError(what, f"in {called.filename}:{called.lineno}", "raise an error there, or let the run end")
    if isinstance(error, torch.distributed.DistError) or any(sign in text for sign in MISSED_PEER_SIGNS):
        what = f"another rank died or fell silent ({first_line(error)})"
        return PeerError(what, "in a collective", "see its own message above")
    if is_dead_data_worker(error):
        fix = "use fewer --num-workers, or 0, if memory ran out, or see what else ended it"
        return DataError(f"a data worker died ({first_line(error)})", "in --loader dataloader", fix)
    if "can't start new thread" in text or os.strerror(errno.EAGAIN) in text:
        return cannot_start(text)
    if is_out_of_memory(error):
        fix = "lower --micro-batch-size, add --activation-checkpointing full, or use fsdp"
        return GptscaleError(f"out of memory ({first_line(error)})", "on this device", fix)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return StorageError(str(error), "in the results folder", "free space or point --out elsewhere")
    return None


def is_dead_data_worker(error: BaseException) -> bool:
    """Return whether an error means that a worker process of torch's DataLoader ended.

    The loader says so itself, unless the broken connection to the worker is met before its death is known.
    """
    if isinstance(error, (ConnectionError, EOFError)):
        frames = traceback.extract_tb(error.__traceback__)
        return any(frame.filename.endswith("torch/utils/data/dataloader.py") for frame in frames)
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, by its class or by a library's message."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)


def end_process(status: int) -> NoReturn:
    """End the process of a rank whose run is over and on disk.

    The interpreter's own teardown could still hang on a peer that is gone, or abort in a library's thread that is still alive,
    which happens now and then with gloo ("terminate called without ...").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
