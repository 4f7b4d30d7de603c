"""Traces of ranks that are made up, each a list of parts of a step with their seconds."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gptscale.common.measure.evidence import RankEvidence, RunEvidence, RunFacts
from gptscale.common.measure.exchanges import TracedExchange
from gptscale.common.measure.step_trace import ATTENTION, COMPUTING, ELEMENTWISE, PRODUCTS, RankTrace
from gptscale.common.process.progress import StepMark

BEGAN = 100.0
FACTS = RunFacts("ddp", grad_accum_steps=4, micro_batch_size=2)


class Part(NamedTuple):
    """A part of a step, or a wait in it.

    exchange: of a wait, the place of what it is for. begins: the kind, ranks and bytes of an exchange that begins with this part.
    """

    part: str
    waits: bool
    seconds: float
    exchange: int = -1
    begins: tuple[str, tuple[int, ...], int] | None = None
    micro_batch: int = -1


SECONDS = {"data": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.005}
HEALTHY = [Part(name, False, seconds) for name, seconds in SECONDS.items()]


def trace(
    rank: int,
    parts: Sequence[Part],
    host: float = 0.0,
    steps: int = 3,
    processor: float = 1.0,
    machine: str = "host",
    behind: float = 0.0,
) -> RankTrace:
    """Return the trace of a rank whose every step has the same parts.

    host: the host's share of computation. processor: the share of computation in which its thread had one. behind: by how
    much the clock of its machine is behind.
    """
    segments, ends, now = list[StepMark](), list[float](), BEGAN - behind
    exchanges: list[TracedExchange] = []
    for _ in range(steps):
        first = len(exchanges)
        for part in parts:
            if part.begins:
                exchanges.append(TracedExchange(*part.begins[:2], len(exchanges), part.begins[2], now))
            place = first + part.exchange if part.exchange >= 0 else -1
            own_s = 0.0 if part.waits else part.seconds * processor
            segments.append(StepMark(*part[:2], now, now + part.seconds, own_s, place, part.micro_batch))
            now += part.seconds
        ends.append(now)
    kinds = {PRODUCTS: 0.7 * (1 - host), ATTENTION: 0.2 * (1 - host), ELEMENTWISE: 0.1 * (1 - host), "optimizer": 0.0}
    work = {
        p.part: {kind: share * processor * p.seconds for kind, share in kinds.items()}
        for p in parts
        if p.part in COMPUTING and not p.waits
    }
    began = BEGAN - behind
    return RankTrace(rank, machine, began, began, segments, ends, work, 100, exchanges=exchanges)


def evidence_of(
    traces: Sequence[RankTrace],
    facts: RunFacts = FACTS,
    data_wait_s: Sequence[float] | None = None,
    right_threads_s: float | None = None,
    fixed: Mapping[str, float] | None = None,
    **more: Any,
) -> RunEvidence:
    """Return the evidence of a run whose timed steps are as those that were traced, where nothing else is said."""
    waits_s = data_wait_s or [
        sum(s.end - s.begin for s in t.segments if s.part == "data" and not s.waits) / len(t.ends) for t in traces
    ]
    ranks = [RankEvidence(t, wait_s, right_threads_s, fixed or {}) for t, wait_s in zip(traces, waits_s, strict=True)]
    step_s = max((t.ends[-1] - t.began) / len(t.ends) for t in traces)
    return RunEvidence("summary.csv", facts, ranks, **{"step_times_s": [step_s] * 10} | more)
