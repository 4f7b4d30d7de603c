"""Traced steps as work that can be replayed: with nothing changed, or with one cause removed."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gptscale.common.measure.step_trace import COMPUTING, TRANSFER, RankTrace
from gptscale.common.process.progress import StepMark
from gptscale.foresight.price.schedule import schedule


class TracedPiece(NamedTuple):
    """A part of a traced step of a rank.

    needs: places of pieces that end before it begins, beside the one before it, which a hidden transfer does not wait for.
    processor: the share of its seconds in which its thread had a processor. micro_batch: that of its mark. ranks, least_s: of a
    transfer, those that take part, and the seconds of the shortest one of its kind with as many bytes or more.
    """

    kind: str
    rank: int
    seconds: float
    needs: tuple[int, ...] = ()
    micro_batch: int = -1
    processor: float = 1.0
    ranks: frozenset[int] = frozenset()
    hidden: bool = False
    least_s: float = 0.0


# How many times as long a piece lasts.
Factor = Callable[[TracedPiece], float]


class Replay:
    """The steps by marks of all ranks.

    An exchange begins when all of its ranks have begun it, and a wait for it ends when it is over. That is how the ranks depend
    on each other here, whatever the recipe.
    waits: of all ranks, by rank and begin. data_wait_s: for each rank its mean wait for a batch in the timed steps. The traced
    ones follow a pause, in which the reader got ahead. threads: whether the marks tell what a thread had of a processor, which
    on a GPU says nothing.
    """

    def __init__(
        self, traces: Sequence[RankTrace], data_wait_s: Sequence[float] | None = None, *, threads: bool = False
    ) -> None:
        self.traces, self.n_steps, self.n_ranks = traces, len(traces[0].ends), len(traces)
        self.segments = [aligned(trace, traces[0]) for trace in traces]
        self.waits = {(wait.rank, wait.begin): wait for wait in find_waits(traces, self.segments)}
        self.pieces = list[TracedPiece]()
        self._ends = [[s.end for s in segments] for segments in self.segments]
        # Transfers that were under way before the wait for them come behind all segments.
        hidden = [wait for wait in self.waits.values() if wait.hidden_s]
        waits = self.waits.values()
        # Fewer bytes take no longer.
        least_s = {
            (name, n): min(w.transfer_s for w in waits if w.kind[0] == name and w.kind[1] >= n)
            for name, n in {w.kind for w in waits}
        }
        places = {id(wait): sum(map(len, self.segments)) + i for i, wait in enumerate(hidden)}
        for rank, segments in enumerate(self.segments):
            n_data = sum(s.part == "data" for s in segments)
            for s in segments:
                if s.waits:
                    wait = self.waits[rank, s.begin]
                    needs = (places[id(wait)],) if wait.hidden_s else self._needs(wait)
                    ranks, least = frozenset(wait.begun), least_s[wait.kind]
                    work = TracedPiece(
                        TRANSFER, rank, wait.transfer_s, needs, s.micro_batch, ranks=ranks, least_s=least
                    )
                    self.pieces.append(work)
                elif s.part == "data" and data_wait_s:
                    self.pieces.append(TracedPiece("data", rank, data_wait_s[rank] * self.n_steps / n_data))
                else:
                    self.pieces.append(_own_work(s, rank, threads))
        for wait in hidden:
            needs, ranks = self._needs(wait), frozenset(wait.begun)
            self.pieces.append(TracedPiece(TRANSFER, wait.rank, wait.hidden_s, needs, ranks=ranks, hidden=True))
        self.seconds = self.step_s() * self.n_steps

    def _needs(self, wait: Wait) -> tuple[int, ...]:
        """Return the places of what the ranks of an exchange do just before they begin it."""
        needs = []
        for rank, begun in wait.begun.items():
            place = bisect_right(self._ends[rank], begun + SAME_S) - 1
            if place >= 0:
                needs.append(sum(map(len, self.segments[:rank])) + place)
        return tuple(needs)

    def step_s(self, factor: Factor = lambda piece: 1.0, *, ranks_wait: bool = True) -> float:
        """Return the mean seconds of a step whose pieces last so many times as long. ranks_wait: whether for each other."""
        pieces, needs, before = self.pieces, list[set[int]](), -1
        for place, piece in enumerate(pieces):
            needs.append({*piece.needs} if ranks_wait else set())
            if not piece.hidden:
                if before >= 0 and pieces[before].rank == piece.rank:
                    needs[place].add(before)
                before = place
        times = schedule(needs, lambda place, begin: pieces[place].seconds * factor(pieces[place]))
        return max((end for _, end in times), default=0.0) / self.n_steps

    def processors_s(self) -> float:
        """Return the seconds that the processors of the busiest machine need for what its ranks compute in a step.

        Where ranks share processors, no step is shorter, whatever it waits for. 0 if the processors are not known.
        """
        busy_s: dict[str, float] = defaultdict(float)
        processors: dict[str, frozenset[int]] = defaultdict(frozenset)
        for trace in self.traces:
            processors[trace.host] |= trace.processors
            busy_s[trace.host] += sum(s.processor_s for s in trace.segments if not s.waits and s.part in COMPUTING)
        return max(
            (busy_s[host] / len(usable) / self.n_steps for host, usable in processors.items() if usable), default=0.0
        )

    def last_step(self) -> list[list[tuple[str, float, float]]]:
        """Return what each rank did in the last step, as (what, begin, end) in seconds since it began."""
        first = self.traces[0]
        began = first.ends[-2] if self.n_steps > 1 else first.began
        ended = max(t.ends[-1] + shift_of(t, first) for t in self.traces)
        of_ranks: list[list[tuple[str, float, float]]] = []
        for rank, segments in enumerate(self.segments):
            pieces = []
            for s in segments:
                if s.waits:
                    arrival = min(max(self.waits[rank, s.begin].arrival, s.begin), s.end)
                    pieces += [("waiting", s.begin, arrival), (TRANSFER, arrival, s.end)]
                else:
                    pieces.append((s.part, s.begin, s.end))
            inside = [(what, max(a, began) - began, min(b, ended) - began) for what, a, b in pieces]
            of_ranks.append([piece for piece in inside if piece[2] > piece[1]])
        return of_ranks

    def own_s(self, rank: int, factor: Factor = lambda piece: 1.0) -> dict[str, float]:
        """Return the seconds of each kind that a rank was at work in the steps, and what its host did besides."""
        seconds: dict[str, float] = defaultdict(float)
        for piece in self.pieces:
            if piece.rank == rank and piece.kind not in (TRANSFER, "data"):
                seconds[piece.kind] += piece.seconds * factor(piece)
        return seconds

    def processor_share(self, rank: int) -> float:
        """Return the share of a rank's computation in which it had a processor."""
        own = [piece for piece in self.pieces if piece.rank == rank and piece.kind in COMPUTING]
        return sum(piece.seconds * piece.processor for piece in own) / max(sum(piece.seconds for piece in own), SAME_S)

    def most_own_work(self) -> tuple[int, float]:
        """Return the rank with the most work of its own, and that divided by the median of the others'."""
        own = [sum(self.own_s(rank).values()) for rank in range(self.n_ranks)]
        rank = own.index(max(own))
        others = [seconds for other, seconds in enumerate(own) if other != rank]
        return rank, own[rank] / max(statistics.median(others), SAME_S) if others else 1.0


def _own_work(mark: StepMark, rank: int, threads: bool) -> TracedPiece:
    seconds = mark.end - mark.begin
    share = min(1.0, mark.processor_s / seconds) if threads and mark.part in COMPUTING else 1.0
    return TracedPiece(mark.part, rank, seconds, micro_batch=mark.micro_batch, processor=share)


# Moments that are no further apart are one.
SAME_S = 1e-9
# A transfer of which a smaller share was over when the wait began was not hidden.
HIDDEN_MIN = 0.1


@dataclass(frozen=True)
class Wait:
    """A wait of a rank for an exchange.

    begun: when each of the ranks that take part had begun it. kind: that of the exchange and its bytes, if they are known.
    hidden_s: what of the transfer was over when the wait began.
    """

    rank: int
    begin: float
    end: float
    begun: Mapping[int, float]
    kind: tuple[str, int]
    hidden_s: float = 0.0

    @property
    def arrival(self) -> float:
        """Return when the last rank had begun. Until then the others wait for it, and from then on for the transfer."""
        return max(self.begun.values(), default=self.begin)

    @property
    def transfer_s(self) -> float:
        """Return how long the rank waited for the transfer."""
        return max(0.0, self.end - max(self.begin, self.arrival))


def find_waits(traces: Sequence[RankTrace], segments: Sequence[Sequence[StepMark]]) -> list[Wait]:
    """Return the waits of all ranks, each with when the others began what it waits for.

    Waits of torch's C++ code do not tell their exchange. They are matched by their order, or else by what ended before them.
    """
    begun: dict[object, dict[int, float]] = defaultdict(dict)
    for rank, trace in enumerate(traces):
        for traced in trace.exchanges:
            begun[traced.name][rank] = traced.begun + shift_of(trace, traces[0])
    unnamed = [[s for s in of_rank if s.waits and s.exchange < 0] for of_rank in segments]
    if len({len(waits) for waits in unnamed}) == 1:
        for n, together in enumerate(zip(*unnamed, strict=True)):
            begun[n] = {rank: s.begin for rank, s in enumerate(together)}
    own_ends = [[s.end for s in of_rank if not s.waits] for of_rank in segments]
    waits = []
    for rank, of_rank in enumerate(segments):
        n_unnamed = 0
        for s in of_rank:
            if not s.waits:
                continue
            exchange = traces[rank].exchanges[s.exchange] if s.exchange >= 0 else None
            needs = begun.get(exchange.name if exchange else n_unnamed, {})
            n_unnamed += exchange is None
            # Nothing ends before all have begun it: what was matched by its order was then another exchange.
            if len(needs) < 2 or max(needs.values()) > s.end + SAME_S:
                ended = {r: bisect_right(ends, s.end + SAME_S) - 1 for r, ends in enumerate(own_ends) if r != rank}
                needs = {r: own_ends[r][i] for r, i in ended.items() if i >= 0}
            kind = (exchange.kind, exchange.nbytes) if exchange else ("", 0)
            waits.append(Wait(rank, s.begin, s.end, needs, kind))
    return _with_hidden(waits)


def _with_hidden(waits: Sequence[Wait]) -> list[Wait]:
    """Return the waits with what of their transfers was over before they began, by other transfers of the same kind and size."""
    seconds_of: dict[tuple[str, int], list[float]] = defaultdict(list)
    for wait in waits:
        if wait.begin - wait.arrival <= HIDDEN_MIN * (wait.end - wait.arrival):
            seconds_of[wait.kind].append(wait.transfer_s)
    typical = {kind: statistics.median(seconds) for kind, seconds in seconds_of.items()}
    over_s = (min(wait.begin - wait.arrival, typical.get(wait.kind, 0.0) - wait.transfer_s) for wait in waits)
    return [replace(wait, hidden_s=max(0.0, seconds)) for wait, seconds in zip(waits, over_s, strict=True)]


def shift_of(trace: RankTrace, first: RankTrace) -> float:
    """Return by how many seconds the clock of a rank is behind that of the first rank. Processes of one machine share a clock."""
    return 0.0 if trace.host == first.host else first.clock - trace.clock


def aligned(trace: RankTrace, first: RankTrace) -> list[StepMark]:
    """Return the segments of a rank by the clock of the first."""
    shift = shift_of(trace, first)
    return [s._replace(begin=s.begin + shift, end=s.end + shift) for s in trace.segments if s.end > s.begin]
