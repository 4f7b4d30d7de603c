"""How a process of a run ends: on request, out of memory, or by an error that the user can act on."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType

import torch

from gptscale.common.errors import GptscaleError, PeerError, StorageError

# Memory that torch's allocator was not asked for: the CPU's, a context's, a library's handle (pytorch/pytorch#128601), Triton's.
OUT_OF_MEMORY_SIGNS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def report(error: BaseException, rank: int) -> tuple[BaseException, int]:
    """Say what ended the run, in one write, so that ranks do not mix; what to note of it, and the exit status."""
    known = as_known(error)
    trace = "" if known else traceback.format_exc()
    sys.stderr.write(f"{trace}gptscale: error: rank {rank}: {known or error}\n")
    return known or error, known.exit_status if known else 130 if isinstance(error, KeyboardInterrupt) else 1


class StopRequest:
    """Whether SIGTERM arrived (preemption). The handler only notes it; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.received


def as_known(error: BaseException) -> GptscaleError | None:
    """The error as one line for the user, or None if it is a defect that deserves its traceback."""
    if isinstance(error, GptscaleError):
        return error
    text = str(error)
    if isinstance(error, torch.distributed.DistError) or "gloo" in text or "Connection closed by peer" in text:
        first = text.splitlines()[0] if text else type(error).__name__
        return PeerError(
            f"another rank died or fell silent ({first[:160]})", "in a collective", "see its own message above"
        )
    if is_out_of_memory(error):
        return GptscaleError(
            f"out of memory ({text.splitlines()[0][:160]})",
            "on this device",
            "lower --micro-batch-size, add --activation-checkpointing full, or use fsdp",
        )
    if isinstance(error, OSError):
        return StorageError(str(error), "in the results folder", "free space or point --out elsewhere")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """torch's exception, Python's, or a library's words for it."""
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))
