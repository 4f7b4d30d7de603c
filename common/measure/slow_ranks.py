"""Which rank is slow: the own work of every rank, gathered once in a window of steps and compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gptscale.common.process.progress import OWN_PARTS, Progress, progress
from gptscale.common.process.world import gather_numbers

# A gather costs a tenth of a millisecond, so it waits for this many steps.
WINDOW_STEPS = 16
# A step or two more or less, at a run's end, say nothing about a rank.
JUDGED_STEPS = 8
SLOW_RATIO = 1.5


class SlowRanks:
    """The own work of all ranks, window by window, from `start_step` on.

    timed_after: the last step of warm-up, whose window is not judged.
    rank, ratio: over the timed steps, the rank with the most own work, and that work divided by the median of the other
    ranks'. None with one process or before the first timed window.
    """

    def __init__(self, start_step: int, timed_after: int, own: Progress = progress) -> None:
        self.timed_after, self.progress = timed_after, own
        self.rank: int | None = None
        self.ratio: float | None = None
        self._done = start_step
        self._total_s: list[float] = []
        self._slow: int | None = None
        own.lap()

    def step(self, step: int, *, last: bool) -> str | None:
        """Take note that the host has seen `step` end, and return a line if the window shows that a rank has become slow.

        All ranks must call it after the same steps. last: this is the last step of the run.
        """
        n, timed = step - self._done, self._done >= self.timed_after
        if n < WINDOW_STEPS and not last and (timed or step < self.timed_after):
            return None
        first, self._done = self._done + 1, step
        parts_s = gather_numbers(self.progress.lap())
        own_s = [sum(parts) for parts in parts_s]
        if not timed or len(own_s) < 2:
            return None
        self._total_s = [a + b for a, b in zip(self._total_s or [0.0] * len(own_s), own_s, strict=True)]
        self.rank, self.ratio = slowest(self._total_s)
        rank, ratio = slowest(own_s)
        before, self._slow = self._slow, rank if ratio >= SLOW_RATIO and n >= JUDGED_STEPS else None
        if self._slow is None or self._slow == before:
            return None
        return (
            f"rank {rank} is slow: {own_s[rank] / n * 1e3:,.1f} ms of its own work a step, {ratio:.1f} times the others', "
            f"above all in {_where(parts_s, rank)}, in steps {first} to {step}"
        )


def slowest(own_s: Sequence[float]) -> tuple[int, float]:
    """Return the rank with the most own work, and that divided by the median of the other ranks'."""
    rank = max(range(len(own_s)), key=own_s.__getitem__)
    others = statistics.median(s for r, s in enumerate(own_s) if r != rank)
    return rank, own_s[rank] / max(others, 1e-9)


def _where(parts_s: Sequence[Sequence[float]], rank: int) -> str:
    """Return the part of the step in which `rank` exceeds the median of the others by most."""
    others = [parts for r, parts in enumerate(parts_s) if r != rank]
    excess = [parts_s[rank][i] - statistics.median(parts[i] for parts in others) for i in range(len(OWN_PARTS))]
    return OWN_PARTS[excess.index(max(excess))]
