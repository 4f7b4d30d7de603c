"""A recorded step replayed: each stream runs what it was given as early as its order, its events and the host allow."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from gptscale.foresight.mock_cuda.watch import FORWARD as FORWARD_NAME
from gptscale.foresight.mock_cuda.watch import PARTS
from gptscale.foresight.price.cost import BESIDE, Costs
from gptscale.foresight.price.record import Work

FORWARD = PARTS.index(FORWARD_NAME)
PRODUCTS, ATTENTION, KERNELS, COPIES, COLLECTIVES = "products", "attention", "other kernels", "copies", "collectives"
HOST, DISK = "the host's optimizer", "the disk"
KINDS = {"collective": COLLECTIVES, "product": PRODUCTS, "copy": COPIES, "host": HOST, "disk": DISK}


@dataclass(frozen=True)
class Span:
    """A piece of work and when it ran, in seconds."""

    work: Work
    begin: float
    end: float

    @property
    def kind(self) -> str:
        """Return the kind of work, as the answer names it."""
        if self.work.kind in KINDS:
            return KINDS[self.work.kind]
        if self.work.is_attention:
            return ATTENTION
        # A convolution has no product of its own among the mock's calls.
        return PRODUCTS if self.work.flops else KERNELS


@dataclass(frozen=True)
class Replayed:
    """One rank's step between two others, in seconds.

    begins: when it does. spans: its work, in the order in which it was asked for.
    """

    step_s: float
    begins: float
    spans: list[Span]

    @property
    def only_sends(self) -> float:
        """Return the seconds in which the device communicates and does nothing else."""
        return sum(end - begin for begin, end in self.exposed())

    @property
    def idle(self) -> float:
        """Return the seconds in which the device does nothing."""
        return self.step_s - sum(end - begin for begin, end in self._covered(self.spans))

    def exposed(self) -> list[tuple[float, float]]:
        """Return from when to when the device communicates and does nothing else."""
        computes = self._covered([span for span in self.spans if span.kind != COLLECTIVES])
        gaps, at = list[tuple[float, float]](), self.begins
        for begin, end in [*computes, (self.begins + self.step_s, self.begins + self.step_s)]:
            gaps, at = [*gaps, (at, begin)] if begin > at else gaps, max(at, end)
        sends = self._covered([span for span in self.spans if span.kind == COLLECTIVES])
        both = ((max(a, c), min(b, d)) for a, b in gaps for c, d in sends if c < b and a < d)
        return [(begin, end) for begin, end in both if end > begin]

    def _covered(self, spans: Sequence[Span]) -> list[tuple[float, float]]:
        """Return from when to when within the step at least one piece of work runs."""
        last = self.begins + self.step_s
        covered = list[tuple[float, float]]()
        for begin, end in sorted((max(self.begins, s.begin), min(last, s.end)) for s in spans):
            if end <= begin:
                continue
            if covered and begin <= covered[-1][1]:
                covered[-1] = (covered[-1][0], max(covered[-1][1], end))
            else:
                covered.append((begin, end))
        return covered

    def forwards(self) -> list[float]:
        """Return when the forward of each micro-batch begins."""
        begins, before = list[float](), -1
        for span in self.spans:
            if span.kind in (PRODUCTS, ATTENTION):
                if span.work.part == FORWARD and before != FORWARD:
                    begins.append(span.begin)
                before = span.work.part
        return begins

    def busy(self) -> dict[str, float]:
        """Return the seconds of each kind of work, as if it ran alone."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.spans:
            seconds[span.kind] += span.end - span.begin
        return dict(seconds)


def replay(ranks: Mapping[int, Sequence[Work]], costs: Costs, host_s: Mapping[int, float]) -> dict[int, Replayed]:
    """Return the step of each rank. It is the second of two in a row, so that the host may be ahead as in a long run.

    host_s: the seconds in which each rank's host asks for a step. Ranks that send to each other wait for each
    other; what comes from a rank that was not recorded is there at once.
    """
    channels: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    players = {rank: _play(rank, work, costs, host_s[rank], channels, {*ranks}) for rank, work in ranks.items()}
    done: dict[int, Replayed] = {}
    needs: dict[int, tuple[int, int]] = {}
    while len(done) < len(players):
        able = [rank for rank in players if rank not in done and (rank not in needs or channels[needs[rank]])]
        if not able:
            raise ValueError("the ranks wait for each other for ever")
        for rank in able:
            try:
                needs[rank] = next(players[rank])
            except StopIteration as stop:
                done[rank] = stop.value
    return done


def _play(
    rank: int,
    works: Sequence[Work],
    costs: Costs,
    host_s: float,
    channels: dict[tuple[int, int], deque[float]],
    known: set[int],
) -> Generator[tuple[int, int], None, Replayed]:
    """Play two steps of a rank. It yields the channel (from, to) from which it needs a message."""
    ready: dict[int, float] = defaultdict(float)
    events: dict[int, float] = {}
    # The link is shared by the collectives of all streams.
    link = communicates_from = communicates_to = host = 0.0
    ends, spans, one = list[float](), list[Span](), 0
    for _ in range(2):
        before, one = 0.0, len(spans)
        for work in _sends_first(works):
            host += (work.at - before) * host_s
            before = work.at
            stream = work.stream
            if work.kind == "record":
                events[work.event] = ready[stream]
            elif work.kind == "wait":
                ready[stream] = max(ready[stream], events.get(work.event, 0.0))
            elif work.kind == "sync":
                waits = {"stream": ready[stream], "event": events.get(work.event, 0.0)}
                host = max(host, waits.get(work.name, max(ready.values(), default=0.0)))
            elif work.kind == "host":
                spans.append(Span(work, host, host + costs.seconds(work)))
                host = spans[-1].end
            else:
                begin = max(host, ready[stream])
                seconds = costs.seconds(work)
                if work.kind == "collective":
                    if work.name == "receive" and work.peer in known:
                        key = (work.peer, rank)
                        while not channels[key]:
                            yield key
                        begin = max(begin, channels[key].popleft())
                    begin = max(begin, link)
                    if work.name == "send" and work.peer in known:
                        channels[rank, work.peer].append(begin)
                    link = begin + seconds
                    communicates_from, communicates_to = begin, link
                else:
                    beside = max(0.0, min(begin + seconds, communicates_to) - max(begin, communicates_from))
                    seconds += beside * (BESIDE - 1)
                ready[stream] = begin + seconds
                spans.append(Span(work, begin, ready[stream]))
        host += (1 - before) * host_s
        ends.append(max([host, *ready.values()]))
    return Replayed(ends[1] - ends[0], ends[0], spans[one:])


def _sends_first(works: Sequence[Work]) -> list[Work]:
    """Return the work with the sends of a group before what it receives: they go at once."""
    ordered, group = list[Work](), list[Work]()
    for work in works:
        if work.kind == "collective" and work.name in ("send", "receive"):
            group.append(work)
        else:
            ordered += sorted(group, key=lambda w: w.name != "send")
            group = []
            ordered.append(work)
    return ordered + group
