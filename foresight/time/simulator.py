"""Play the work of a step on its streams, and say which operations made it as long as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gptscale.foresight.time.work import BESIDE, COMPUTE, GATHER, HOST, LAUNCHES, REDUCE, Operation, StepWork, Work

# How sharp the edge is between the host, the device and the links as what limits a work.
EDGE = 4.0


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

    def shares(self, seconds: Callable[[Operation], float]) -> dict[Operation, float]:
        """Return by how many per cent the step is longer if an operation takes one per cent longer.

        seconds: what the step was played with. Without contention, the shares of all operations sum up to 1.
        """
        own_seconds = max(self.seconds, 1e-300)
        n_of_work: dict[int, int] = {}
        for place in self.critical_path():
            work = self.step.items[place].work
            n_of_work[work] = n_of_work.get(work, 0) + 1
        total: dict[Operation, float] = {}
        for place, n in n_of_work.items():
            by_operation = {op: count * seconds(op) for op, count in self.step.works[place].items()}
            lanes = _lanes(by_operation)
            lanes.pop(GATHER, None)
            longest = _longest(lanes.values())
            device = next((op.on for op in by_operation if op.kind == LAUNCHES), None)
            for operation, own in by_operation.items():
                lane = _lane(operation, device)
                of_limit = (lanes[lane] / longest) ** (EDGE - 1) if lane in lanes and longest else 1.0
                total[operation] = total.get(operation, 0.0) + n * own * of_limit / own_seconds
        return total

    def busy_s(self, rank: int, stream: str) -> float:
        """Return the seconds in which a stream of a rank is not idle."""
        items = zip(self.step.items, self.begins, self.ends, strict=True)
        return sum(end - begin for item, begin, end in items if (item.rank, item.stream) == (rank, stream))


def seconds_of(work: Work, seconds: Callable[[Operation], float]) -> float:
    """Return how long a work takes.

    Launches on the host, the device, and what is sent beside it go on at the same time, and the longest counts. What is sent in
    between holds up all of them: the ranks of a collective come together, however late their hosts are.
    """
    lanes = _lanes({operation: n * seconds(operation) for operation, n in work.items()})
    between = lanes.pop(GATHER, 0.0)
    return between + _longest(lanes.values())


def _lane(operation: Operation, device: str | None) -> str:
    if operation.kind == LAUNCHES:
        return HOST
    if operation.kind.startswith(BESIDE):
        return REDUCE
    return COMPUTE if device in (None, operation.on) else GATHER


def _lanes(by_operation: Mapping[Operation, float]) -> dict[str, float]:
    """Return the seconds of what goes on at the same time. GATHER: what is sent in between."""
    device = next((operation.on for operation in by_operation if operation.kind == LAUNCHES), None)
    lanes: dict[str, float] = {}
    for operation, own in by_operation.items():
        lane = _lane(operation, device)
        lanes[lane] = lanes.get(lane, 0.0) + own
    return lanes


def _longest(lanes: Collection[float]) -> float:
    """Return the largest of some times, with a soft edge between them."""
    return sum(lanes) if len(lanes) < 2 else sum(own**EDGE for own in lanes) ** (1 / EDGE)


def play(
    step: StepWork,
    seconds: Callable[[Operation], float],
    contention: Contention | None = None,
    slow_ranks: Mapping[int, float] | None = None,
) -> PlayedStep:
    """Run a step as fast as its streams and dependencies allow.

    slow_ranks: how many times longer a rank computes. Raises ValueError for items that wait for each other for ever.
    """
    of_work = [seconds_of(work, seconds) for work in step.works]
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
    # This raises for a step that never ends.
    step.order()
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
