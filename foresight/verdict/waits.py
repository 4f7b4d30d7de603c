"""The waits of traced steps: which exchange each is for, when the last rank had begun that, and what was over before."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gptscale.common.measure.step_trace import RankTrace
from gptscale.common.process.progress import StepMark

# Moments that are no further apart are one.
SAME_S = 1e-9
# A transfer of which a smaller share was over when the wait began was not hidden.
HIDDEN_MIN = 0.1


@dataclass(frozen=True)
class Wait:
    """A wait of a rank for an exchange.

    begun: when each of the ranks that take part had begun it. hidden_s: what of the transfer was over when the wait began.
    """

    rank: int
    begin: float
    end: float
    begun: Mapping[int, float]
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
    waits, nbytes = [], list[tuple[str, int]]()
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
            waits.append(Wait(rank, s.begin, s.end, needs))
            nbytes.append((exchange.kind, exchange.nbytes) if exchange else ("", 0))
    return _with_hidden(waits, nbytes)


def _with_hidden(waits: Sequence[Wait], kinds: Sequence[tuple[str, int]]) -> list[Wait]:
    """Return the waits with what of their transfers was over before they began, by other transfers of the same kind and size."""
    seconds_of: dict[tuple[str, int], list[float]] = defaultdict(list)
    for wait, kind in zip(waits, kinds, strict=True):
        if wait.begin - wait.arrival <= HIDDEN_MIN * (wait.end - wait.arrival):
            seconds_of[kind].append(wait.transfer_s)
    typical = {kind: statistics.median(seconds) for kind, seconds in seconds_of.items()}
    return [
        replace(wait, hidden_s=max(0.0, min(wait.begin - wait.arrival, typical.get(kind, 0.0) - wait.transfer_s)))
        for wait, kind in zip(waits, kinds, strict=True)
    ]


def shift_of(trace: RankTrace, first: RankTrace) -> float:
    """Return by how many seconds the clock of a rank is behind that of the first rank. Processes of one machine share a clock."""
    return 0.0 if trace.host == first.host else first.clock - trace.clock


def aligned(trace: RankTrace, first: RankTrace) -> list[StepMark]:
    """Return the segments of a rank by the clock of the first."""
    shift = shift_of(trace, first)
    return [s._replace(begin=s.begin + shift, end=s.end + shift) for s in trace.segments if s.end > s.begin]
