"""A recorded step replayed: each stream runs what it was given as early as its order, its events and the host allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gptscale.foresight.mock_cuda.watch import FORWARD as FORWARD_NAME
from gptscale.foresight.mock_cuda.watch import PARTS
from gptscale.foresight.price.cost import BESIDE, Costs
from gptscale.foresight.price.record import MESSAGES, Work
from gptscale.foresight.price.schedule import schedule

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
        return sum(end - begin for begin, end in self.exposed())

    @property
    def idle(self) -> float:
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
    asked = _Asked(costs)
    ends = {rank: asked.steps(rank, works, host_s[rank]) for rank, works in ranks.items()}
    for (source, rank), places in asked.received.items():
        # A message can be there as soon as its sender begins to send it.
        sent = asked.sent[source, rank] if source in ranks else []
        if source in ranks and len(sent) < len(places):
            raise ValueError(f"ranks wait for each other: rank {source} sends too little to rank {rank}")
        for place, begins in zip(places, sent, strict=False):
            asked.needs[place].add(begins)
    sends: dict[int, tuple[float, float]] = {}

    def seconds(place: int, begin: float) -> float:
        rank, works, alone = asked.pieces[place]
        if works and works[0].kind == "collective":
            sends[rank] = (begin, begin + alone)
        elif works and works[0].kind != "host":
            since, until = sends.get(rank, (0.0, 0.0))
            alone += max(0.0, min(begin + alone, until) - max(begin, since)) * (BESIDE - 1)
        return alone

    times = schedule(asked.needs, seconds)
    steps = {}
    for rank, (first, last) in ends.items():
        # Messages that start together are one.
        spans = [Span(works[0], *times[first + i]) for i, (_, works, _) in enumerate(asked.pieces[first:last]) if works]
        steps[rank] = Replayed(times[last][1] - times[first][1], times[first][1], spans)
    return steps


class _Asked:
    """The pieces of work that hosts ask for.

    pieces: of each its rank, its work and its seconds alone. needs: of each the places of others. sent, received: by the rank
    that sends and the one that receives, the places where messages begin to be sent, and where they are waited for.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.pieces = list[tuple[int, Sequence[Work], float]]()
        self.needs = list[set[int]]()
        self.sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, rank: int, needs: Collection[int], seconds: float = 0.0, works: Sequence[Work] = ()) -> int:
        """Add a piece and return its place."""
        self.pieces.append((rank, works, seconds))
        self.needs.append({*needs})
        return len(self.pieces) - 1

    def steps(self, rank: int, works: Sequence[Work], host_s: float) -> tuple[int, int]:
        """Add two steps of a rank, and return the places of their ends."""
        ready: dict[int, set[int]] = defaultdict(set)
        events: dict[int, set[int]] = defaultdict(set)
        # The link is shared by the collectives of all streams.
        link, ends, host = set[int](), list[int](), self.add(rank, ())
        for _ in range(2):
            before = 0.0
            for group in started_together(works):
                work, stream = group[0], group[0].stream
                if host_s and work.at > before:
                    host = self.add(rank, {host}, (work.at - before) * host_s)
                before = work.at
                if work.kind == "record":
                    events[work.event] = ready[stream]
                elif work.kind == "wait":
                    ready[stream] = ready[stream] | events[work.event]
                elif work.kind == "sync":
                    waits = {"stream": ready[stream], "event": events[work.event]}
                    host = self.add(rank, {host} | waits.get(work.name, set().union(*ready.values())))
                elif work.kind == "host":
                    host = self.add(rank, {host}, self.costs.seconds(work), group)
                elif work.kind == "collective":
                    begins = self.add(rank, {host} | ready[stream] | link)
                    link = ready[stream] = {self.add(rank, {begins}, self.costs.together(group), group)}
                    for message in group:
                        if message.peer is not None and message.name == "send":
                            self.sent[rank, message.peer].append(begins)
                        elif message.peer is not None:
                            self.received[message.peer, rank] += link
                else:
                    ready[stream] = {self.add(rank, {host} | ready[stream], self.costs.seconds(work), group)}
            host = self.add(rank, {host}, (1 - before) * host_s)
            ends.append(self.add(rank, {host}.union(*ready.values())))
        return ends[0], ends[1]


def started_together(works: Iterable[Work]) -> Iterator[Sequence[Work]]:
    """Yield messages that follow each other on a stream as one group, and all other work by itself."""
    for stream, group in groupby(works, lambda work: work.stream if work.name in MESSAGES else None):
        each = [*group]
        yield from ([work] for work in each) if stream is None else [each]
