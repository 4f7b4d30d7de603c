"""Where this process is in its training: the step, the part of the step, and the seconds spent in each part.

Ranks of a synchronous run wait for each other, so that all their steps take equally long. A slow rank shows only in its own
work, the time in which it does not wait. Therefore the waits for other ranks are counted apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# The parts of a step that are a rank's own work.
OWN_PARTS = ("data", "forward", "backward", "optimizer", "disk", "record", "stopped")
# Parts that are no work of the step: waits for other ranks, and what the loop does between steps.
WAIT, BETWEEN_STEPS = "wait", ("set-up", "evaluation", "saving", "closing", "failed")
# A pause is told up to this long after its end.
JUST_NOW_S = 0.25


class StepMark(NamedTuple):
    """What a process did from `begin` to `end`, in seconds: a part of the step, or in it a wait for other ranks.

    processor_s: what its main thread had of a processor meanwhile. A thread that computes and has less was held up.
    exchange: the place of what it waited for, in the log of exchanges, or -1. micro_batch: which of the step it worked on, or -1.
    """

    part: str
    waits: bool
    begin: float
    end: float
    processor_s: float = 0.0
    exchange: int = -1
    micro_batch: int = -1


class Progress:
    """The place of one process, which `at` and `waiting` keep up to date for less than a microsecond each.

    step: the 1-based step that is being computed. part: where in the step. waits: whether it waits for another rank there.
    since: when this part or wait began, by `clock`. marks: while a step is traced, all parts and waits so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.step, self.part, self.waits = 0, "set-up", False
        self.since = clock()
        self.marks: list[StepMark] | None = None
        self.exchange = self.micro_batch = -1
        self._processor_s = 0.0
        # When the last wait ended, and how long it was.
        self._last_wait = (0.0, 0.0)
        self.seconds: dict[str, float] = dict.fromkeys((*OWN_PARTS, WAIT, *BETWEEN_STEPS), 0.0)

    def _turn(self, part: str, waits: bool) -> None:
        now = self.clock()
        self.seconds[WAIT if self.waits else self.part] += now - self.since
        if self.waits:
            self._last_wait = (now, now - self.since)
        if self.marks is not None:
            processor_s = time.thread_time()
            spent = processor_s - self._processor_s
            self._processor_s, exchange = processor_s, self.exchange if self.waits else -1
            self.marks.append(StepMark(self.part, self.waits, self.since, now, spent, exchange, self.micro_batch))
        self.part, self.waits, self.since = part, waits, now

    def at(self, part: str, micro_batch: int = -1) -> None:
        """Say that `part` begins, of the 0-based micro-batch if it is one's."""
        self._turn(part, False)
        self.micro_batch = micro_batch

    def wait_begins(self) -> None:
        """Say that this process has done its work of the part, and waits for other ranks until the next part begins."""
        self._turn(self.part, True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as a wait for other ranks."""
        before = self.waits
        self._turn(self.part, True)
        try:
            yield
        finally:
            self._turn(self.part, before)

    def split(self) -> None:
        """End the mark of the part that goes on, and begin another."""
        self._turn(self.part, self.waits)

    @contextmanager
    def marking(self) -> Iterator[list[StepMark]]:
        """Keep a mark of every part and wait until the end."""
        self.split()
        self._processor_s, self.marks = time.thread_time(), []
        try:
            yield self.marks
        finally:
            self.split()
            self.marks = None

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Count what happens inside as `part`, and go on with the part before."""
        before = self.part, self.waits
        self._turn(part, False)
        try:
            yield
        finally:
            self._turn(*before)

    def stood_still(self, seconds: float) -> None:
        """Count a pause of the whole process (SIGSTOP, no processor) as this rank's own, if it fell into a wait.

        It is told just after the pause, when the wait may have ended.
        """
        now = self.clock()
        ended, wait_s = (now, now - self.since) if self.waits else self._last_wait
        if now - ended < JUST_NOW_S and wait_s > seconds - JUST_NOW_S:
            self.seconds["stopped"] += seconds
            self.seconds[WAIT] -= seconds

    def lap(self) -> list[float]:
        """Return the seconds in each of OWN_PARTS since the last lap, and begin the next."""
        self._turn(self.part, self.waits)
        own = [self.seconds[part] for part in OWN_PARTS]
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return own


# A process trains once, and what it does is told by several rooms.
progress = Progress()


def count_waits() -> None:
    """Count as waits the places where torch's Python code blocks until a collective is done.

    What its C++ code waits for, such as DDP at the end of backward, is told by the engine (`wait_begins`).
    """
    from torch.distributed import _functional_collectives

    if not hasattr(dist.Work.wait, "counted"):
        dist.Work.wait = _counted(dist.Work.wait)  # type: ignore[method-assign]
        _functional_collectives.wait_tensor = _counted(_functional_collectives.wait_tensor)


def _counted(wait: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        # A save behind the training waits in a thread of its own, and compiled code does not count.
        if torch.compiler.is_compiling() or threading.current_thread() is not threading.main_thread():
            return wait(*arguments, **options)
        with progress.waiting():
            return wait(*arguments, **options)

    counted.counted = True  # type: ignore[attr-defined]
    return counted
