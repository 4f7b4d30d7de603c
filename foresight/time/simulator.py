"""Play the work of a step on its streams, and say which operations made it as long as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptscale.foresight.time.work import COMPUTE, Operation, StepWork


class Contention(NamedTuple):
    """How many times longer work takes while a rank computes and communicates at once."""

    compute: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True)
class PlayedStep:
    """A step that was played.

    begins, ends: of each item, in seconds. after: the item whose end let each item begin, or -1.
    """

    step: StepWork
    begins: list[float]
    ends: list[float]
    after: list[int]

    @property
    def seconds(self) -> float:
        """Return the length of the step."""
        return max(self.ends, default=0.0)

    def critical_path(self) -> list[int]:
        """Return the chain of items, first to last, that fills the step from beginning to end."""
        place = max(range(len(self.ends)), key=self.ends.__getitem__, default=-1)
        path = []
        while place >= 0:
            path.append(place)
            place = self.after[place]
        return path[::-1]

    def critical_work(self) -> dict[Operation, float]:
        """Return how often each operation is done on the critical path.

        Without contention, the length of the step is the sum of these counts times the seconds of each operation.
        """
        n_of_work: dict[int, int] = {}
        for place in self.critical_path():
            work = self.step.items[place].work
            n_of_work[work] = n_of_work.get(work, 0) + 1
        total: dict[Operation, float] = {}
        for work, n in n_of_work.items():
            for operation, count in self.step.works[work].items():
                total[operation] = total.get(operation, 0.0) + n * count
        return total

    def busy_s(self, rank: int, stream: str) -> float:
        """Return the seconds in which a stream of a rank is not idle."""
        items = zip(self.step.items, self.begins, self.ends, strict=True)
        return sum(end - begin for item, begin, end in items if (item.rank, item.stream) == (rank, stream))


def play(
    step: StepWork,
    seconds: Callable[[Operation], float],
    contention: Contention | None = None,
    slow_ranks: Mapping[int, float] | None = None,
) -> PlayedStep:
    """Run a step as fast as its streams and dependencies allow.

    slow_ranks: how many times longer a rank computes. Raises ValueError for items that wait for each other for ever.
    """
    of_work = [sum(n * seconds(operation) for operation, n in work.items()) for work in step.works]
    durations = [of_work[item.work] for item in step.items]
    if slow_ranks:
        for i, item in enumerate(step.items):
            if item.stream == COMPUTE:
                durations[i] *= slow_ranks.get(item.rank, 1.0)
    if contention is None or contention == Contention():
        return _play_apart(step, durations)
    return _play_together(step, durations, contention)


def _play_apart(step: StepWork, durations: Sequence[float]) -> PlayedStep:
    """Play items whose durations do not depend on each other, by one walk in the order of their dependencies."""
    before = step.before()
    begins, ends, after = [0.0] * len(durations), [0.0] * len(durations), [-1] * len(durations)
    for place in step.order():
        begin, reason = 0.0, -1
        for other in before[place]:
            if ends[other] >= begin:
                begin, reason = ends[other], other
        begins[place], ends[place], after[place] = begin, begin + durations[place], reason
    return PlayedStep(step, begins, ends, after)


def _play_together(step: StepWork, durations: Sequence[float], contention: Contention) -> PlayedStep:
    """Play items that slow each other down: from one event to the next, each running item has a rate."""
    before = step.before()
    step.order()  # raises for a step that never ends
    n_waiting = [len(others) for others in before]
    followers: list[list[int]] = [[] for _ in before]
    for place, others in enumerate(before):
        for other in others:
            followers[other].append(place)
    left, after = list(durations), [-1] * len(durations)
    begins, ends = [0.0] * len(durations), [0.0] * len(durations)
    running = [place for place, n in enumerate(n_waiting) if not n]
    now = 0.0
    while running:
        # Items without a duration, such as arrivals, disturb nobody.
        computing = {step.items[i].rank for i in running if left[i] > 0 and step.items[i].stream == COMPUTE}
        sending = {step.items[i].rank for i in running if left[i] > 0 and step.items[i].stream != COMPUTE}
        factors = [
            1.0
            if step.items[i].rank not in computing & sending
            else (contention.compute if step.items[i].stream == COMPUTE else contention.communication)
            for i in running
        ]
        passed = min(left[i] * factor for i, factor in zip(running, factors, strict=True))
        now += passed
        ended = [i for i, factor in zip(running, factors, strict=True) if left[i] * factor <= passed * (1 + 1e-12)]
        for i, factor in zip(running, factors, strict=True):
            left[i] -= passed / factor
        running = [i for i in running if i not in ended]
        for i in ended:
            ends[i] = now
            for follower in followers[i]:
                n_waiting[follower] -= 1
                if not n_waiting[follower]:
                    begins[follower], after[follower] = now, i
                    running.append(follower)
    return PlayedStep(step, begins, ends, after)
