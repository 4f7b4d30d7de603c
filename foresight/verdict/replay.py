"""Traced steps as work that can be played again: with nothing changed, or with one cause removed."""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gptscale.common.measure.step_trace import COMPUTING, RankTrace, Segment
from gptscale.foresight.time.simulator import PlayedStep, play
from gptscale.foresight.time.work import COMPUTE, Item, Operation, StepWork

# The kind of an item that is a wait. All other kinds are parts of a step, by the names of Segment.
TRANSFER = "transfer"
NEEDS_MAX = 8
# How many times as long an operation lasts.
Factor = Callable[[Operation], float]


@dataclass(frozen=True)
class Wait:
    """A wait of a rank: until `arrival` the latest other rank was not there yet, and from then on data were transferred."""

    rank: int
    begin: float
    arrival: float
    end: float
    late_rank: int


class Replay:
    """The steps by marks of all ranks.

    A wait of a rank ends when the others have done what they had done when it really ended, plus the transfer. That is how
    the ranks depend on each other here, whatever the recipe.
    waits: of all ranks. data_wait_s: for each rank its mean wait for a batch in the timed steps. The traced ones follow a pause,
    in which the reader got ahead.
    """

    def __init__(self, traces: Sequence[RankTrace], data_wait_s: Sequence[float] | None = None) -> None:
        self.n_steps, self.n_ranks = len(traces[0].ends), len(traces)
        self.segments = [_aligned(trace, traces[0]) for trace in traces]
        self.step, self.waits = StepWork(), list[Wait]()
        self.seconds: dict[Operation, float] = {}
        own = [[(s.end, place) for place, s in self._places(rank) if not s.waits] for rank in range(self.n_ranks)]
        ends = [[end for end, _ in of_rank] for of_rank in own]
        for rank, segments in enumerate(self.segments):
            n_data = sum(s.part == "data" for s in segments)
            for segment in segments:
                needs: list[int] = []
                seconds, kind = segment.end - segment.begin, segment.part
                if segment.waits:
                    wait, needs = self._wait(rank, segment, own, ends)
                    seconds, kind = segment.end - wait.arrival, TRANSFER
                elif kind == "data" and data_wait_s:
                    seconds = data_wait_s[rank] * self.n_steps / n_data
                operation = Operation(kind, (len(self.step.items),), str(rank))
                self.seconds[operation] = seconds
                self.step.works.append({operation: 1.0})
                self.step.items.append(Item(kind, rank, COMPUTE, len(self.step.items), tuple(needs)))
        self.base = self.play(lambda operation: 1.0)
        first = traces[0]
        self._last = (
            first.ends[-2] if self.n_steps > 1 else first.began,
            max(t.ends[-1] + _shift(t, first) for t in traces),
        )

    def _places(self, rank: int) -> list[tuple[int, Segment]]:
        first = sum(len(of_rank) for of_rank in self.segments[:rank])
        return list(enumerate(self.segments[rank], start=first))

    def _wait(
        self, rank: int, segment: Segment, own: list[list[tuple[float, int]]], ends: list[list[float]]
    ) -> tuple[Wait, list[int]]:
        """Return a wait, and the places of what the other ranks had done at its end."""
        last = {other: bisect_right(ends[other], segment.end) - 1 for other in range(self.n_ranks) if other != rank}
        done = {other: own[other][i] for other, i in last.items() if i >= 0}
        late = max(done, key=lambda other: done[other][0], default=rank)
        arrival = max(segment.begin, done[late][0]) if done else segment.begin
        self.waits.append(wait := Wait(rank, segment.begin, arrival, segment.end, late))
        # Those that came long before the last one would hold up nobody, whatever is removed.
        return wait, [place for _, place in heapq.nlargest(NEEDS_MAX, done.values())]

    def play(self, factor: Factor, *, ranks_wait: bool = True) -> PlayedStep:
        """Play all traced steps, with the seconds of each operation times a factor. ranks_wait: whether for each other."""
        step = self.step
        if not ranks_wait:
            step = StepWork([item._replace(needs=()) for item in step.items], step.works)
        return play(step, lambda operation: self.seconds[operation] * factor(operation))

    def step_s(self, factor: Factor = lambda operation: 1.0, *, ranks_wait: bool = True) -> float:
        """Return the mean seconds of a step that is played in this way."""
        return self.play(factor, ranks_wait=ranks_wait).seconds / self.n_steps

    def last_step(self) -> list[list[tuple[str, float, float]]]:
        """Return what each rank did in the last step, as (what, begin, end) in seconds since it began."""
        began, ended = self._last
        waits = {(wait.rank, wait.begin): wait for wait in self.waits}
        of_ranks: list[list[tuple[str, float, float]]] = []
        for rank, segments in enumerate(self.segments):
            pieces = []
            for s in segments:
                if s.waits:
                    arrival = waits[rank, s.begin].arrival
                    pieces += [("waiting", s.begin, arrival), (TRANSFER, arrival, s.end)]
                else:
                    pieces.append((s.part, s.begin, s.end))
            inside = [(what, max(a, began) - began, min(b, ended) - began) for what, a, b in pieces]
            of_ranks.append([piece for piece in inside if piece[2] > piece[1]])
        return of_ranks

    def own_s(self, rank: int) -> float:
        """Return the seconds that a rank computed in the steps, with what its host did besides."""
        return sum(s for o, s in self.seconds.items() if o.on == str(rank) and o.kind not in (TRANSFER, "data"))

    def most_own_work(self) -> tuple[int, float]:
        """Return the rank with the most work of its own, and that divided by the median of the others'."""
        own = [self.own_s(rank) for rank in range(self.n_ranks)]
        rank = own.index(max(own))
        others = [seconds for other, seconds in enumerate(own) if other != rank]
        return rank, own[rank] / max(statistics.median(others), 1e-9) if others else 1.0


def without(*kinds: str) -> Factor:
    """Return the factors that remove all operations of some kinds."""
    return lambda operation: 0.0 if operation.kind in kinds else 1.0


def with_less_host(host: Mapping[str, float], removed: float = 1.0) -> Factor:
    """Return the factors that remove a part of the host's work, whose share of each computing part is `host`."""

    def factor(operation: Operation) -> float:
        if operation.kind == "host":
            return 1.0 - removed
        return 1.0 - removed * host.get(operation.kind, 0.0) if operation.kind in COMPUTING else 1.0

    return factor


def with_rank_faster(rank: int, times: float) -> Factor:
    """Return the factors that make one rank compute `times` as fast."""
    return lambda o: 1.0 / times if o.on == str(rank) and o.kind not in (TRANSFER, "data") else 1.0


def _shift(trace: RankTrace, first: RankTrace) -> float:
    """Return by how many seconds the clock of a rank is behind that of the first rank. Processes of one machine share a clock."""
    return 0.0 if trace.host == first.host else first.clock - trace.clock


def _aligned(trace: RankTrace, first: RankTrace) -> list[Segment]:
    """Return the segments of a rank by the clock of the first."""
    shift = _shift(trace, first)
    return [s._replace(begin=s.begin + shift, end=s.end + shift) for s in trace.segments if s.end > s.begin]
