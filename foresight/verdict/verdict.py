"""The verdict on a run's speed: what limits it, what removing that would give, and what to do.

Every cause is sized by playing the traced steps again without it. The largest is named, if it is worth a word.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptscale.common.measure.contention import TAKEN_MAX
from gptscale.common.measure.step_trace import COMPUTING, ELEMENTWISE, KINDS, RankTrace
from gptscale.foresight.verdict.remedies import (
    BUBBLE,
    BUS,
    COMPUTE_BOUND,
    CONTENDED,
    DATA,
    DISK,
    LATE,
    LAUNCH,
    LINKS,
    MEMORY,
    NO_CAUSE,
    THREADS,
    RunFacts,
    remedy,
)
from gptscale.foresight.verdict.replay import Replay, with_less_host, with_rank_faster, without

# What a rank's time goes to beside the kinds of computation.
SHARES = ("data", "host", "transfer", "late rank", "bubble", "disk", "bus", "allocator")
# A cause that gives less is not worth a word.
GAIN_MIN = 0.05
# From this share of computation on, a run without a cause is computing as it should.
COMPUTING_MIN = 0.6
# A late rank that costs so much of what others took is named instead of them.
LATE_OF_TAKEN = 0.8
# In a pipeline stages are never quite equal. Elsewhere ranks do the same work.
LATE_RATIO = {True: 1.5, False: 1.1}


@dataclass(frozen=True)
class Cause:
    """A cause, the seconds of a step without it, and its share of the step."""

    name: str
    without_s: float
    share: float


@dataclass(frozen=True)
class Verdict:
    """What limits a run.

    bound_by: one of WORDS. step_s: the median of the timed steps. spread: half the range from their p10 to their p90, divided by
    the median. traced_s: the mean traced step. shares: of all ranks' time in the traced steps, with the sum 1. causes: all that
    could be sized, the largest gain first. remedied_s: the step with the remedy, where that removes only a part of the cause.
    ranks: what each did in the last step by marks, as (what, begin, end).
    """

    bound_by: str
    step_s: float
    spread: float
    traced_s: float
    shares: dict[str, float]
    causes: list[Cause]
    late_rank: int | None = None
    taken: float | None = None
    remedy: str = ""
    remedied_s: float | None = None
    ranks: list[list[tuple[str, float, float]]] = field(default_factory=list)

    @property
    def cause(self) -> Cause | None:
        return next((cause for cause in self.causes if cause.name == self.bound_by), None)

    def gain(self, cause: Cause) -> float:
        """Return the part of the step that removing a cause would save."""
        return max(0.0, 1 - cause.without_s / self.step_s)

    def columns(self) -> dict[str, Any]:
        """Return the columns of the summary row."""
        if self.cause is None:
            return {"bound_by": self.bound_by}
        figures = {"bound_share": self.cause.share, "gain_if_removed": self.gain(self.cause)}
        return {"bound_by": self.bound_by, **figures, "late_rank": self.late_rank}

    def line(self) -> str:
        """Return the verdict in one line."""
        if self.cause is None:
            computing = sum(self.shares.get(kind, 0.0) for kind in KINDS)
            words = {COMPUTE_BOUND: f"{computing:.0%} of the time is computation", NO_CAUSE: "no cause alone costs 5 %"}
            return f"{self.bound_by}: {words[self.bound_by]}{self.remedy and f'; {self.remedy}'}"
        who = f", rank {self.late_rank}" if self.late_rank is not None else ""
        times = f"{1e3 * self.cause.without_s:,.4g} instead of {1e3 * self.step_s:,.4g} ms without it"
        return f"{self.bound_by}{who}: {times} (-{self.gain(self.cause):.0%}){self.remedy and f'; {self.remedy}'}"


def judge(
    traces: Sequence[RankTrace],
    facts: RunFacts,
    *,
    step_times_s: Sequence[float],
    data_wait_s: Sequence[float] | None = None,
    taken: float | None = None,
    right_threads_s: float | None = None,
    slowest: tuple[int, float] | None = None,
) -> Verdict:
    """Return the verdict on the traces of all ranks.

    step_times_s: of the timed steps. data_wait_s: for each rank, its mean wait for a batch in them. taken: what others had of the
    machine. right_threads_s: what a traced step took with as many threads as there are processors, if the run has others.
    slowest: the rank with the most work of its own in the timed steps, and that divided by the median of the others'. Without it
    the traced steps tell.
    """
    replay = Replay(traces, data_wait_s)
    median = statistics.median(step_times_s)
    ordered = sorted(step_times_s)
    p10, p90 = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
    # What torch.compile makes for a CPU is no operation that the profiler sees.
    unseen = facts.compiled and not facts.cuda
    traced_s, host = replay.step_s(), dict.fromkeys(COMPUTING, 0.0) if unseen else host_shares(traces)
    shares = shares_of(replay, host, work_of_ranks(traces), facts.pipeline)
    late, ratio = replay.most_own_work()
    if slowest is not None:
        late, ratio = next((i for i, t in enumerate(traces) if t.rank == slowest[0]), late), slowest[1]

    def sized(name: str, seconds: float, share: float) -> Cause:
        return Cause(name, median * min(1.0, seconds / traced_s), share)

    causes = [
        sized(DATA, replay.step_s(without("data")), shares["data"]),
        sized(LAUNCH, replay.step_s(with_less_host(host)), shares["host"]),
        sized(LINKS, replay.step_s(without("transfer")), shares["transfer"]),
        sized(DISK, replay.step_s(without("disk")), shares["disk"]),
        sized(BUS, replay.step_s(without("bus")), shares["bus"]),
        sized(MEMORY, replay.step_s(without("allocator")), shares["allocator"]),
    ]
    if facts.pipeline:
        causes.append(sized(BUBBLE, replay.step_s(ranks_wait=False), shares["bubble"]))
    if ratio >= LATE_RATIO[facts.pipeline]:
        causes.append(
            sized(LATE, replay.step_s(with_rank_faster(late, ratio)), shares["late rank"] or shares["bubble"])
        )
    if taken is not None and taken > TAKEN_MAX:
        causes.append(Cause(CONTENDED, median * (1 - taken), taken))
    if right_threads_s is not None:
        causes.append(sized(THREADS, right_threads_s, max(0.0, 1 - right_threads_s / traced_s)))
    causes.sort(key=lambda cause: cause.without_s)
    spread = (p90 - p10) / 2 / median
    word = named(causes, median, spread) or (COMPUTE_BOUND if _computing(shares) >= COMPUTING_MIN else NO_CAUSE)
    partly = {LAUNCH: with_less_host(host, 1 - 1 / facts.grad_accum_steps)} if facts.grad_accum_steps > 1 else {}
    return Verdict(
        bound_by=word,
        step_s=median,
        spread=spread,
        traced_s=traced_s,
        shares=shares,
        causes=causes,
        late_rank=traces[late].rank if word == LATE else None,
        taken=taken,
        remedy=remedy(word, facts),
        remedied_s=median * replay.step_s(partly[word]) / traced_s if word in partly else None,
        ranks=replay.last_step(),
    )


def named(causes: Sequence[Cause], step_s: float, spread: float) -> str | None:
    """Return the cause to name, None if none is worth it.

    Others on the machine, and threads that wait for each other, make steps differ, so that the spread says nothing against these.
    If others slow one rank down, and that rank is all that they cost, it is named.
    """
    gains = {c.name: 1 - c.without_s / step_s for c in causes}
    uneven = {CONTENDED, THREADS} | ({LATE} if CONTENDED in gains else set())
    worth = {n: gain for n, gain in gains.items() if gain >= GAIN_MIN and (gain > spread or n in uneven)}
    if LATE in worth and worth[LATE] >= LATE_OF_TAKEN * worth.get(CONTENDED, 0.0):
        worth.pop(CONTENDED, None)
    return max(worth, key=lambda name: worth[name], default=None)


def work_of_ranks(traces: Sequence[RankTrace]) -> dict[str, dict[str, float]]:
    """Return the seconds of each kind of work in each computing part, of all ranks together."""
    return {
        part: {kind: sum(t.work_s.get(part, {}).get(kind, 0.0) for t in traces) for kind in KINDS} for part in COMPUTING
    }


def host_shares(traces: Sequence[RankTrace]) -> dict[str, float]:
    """Return the share of each computing part that is the host: what remains when the work of its operations is taken away."""
    shares = {}
    for part in COMPUTING:
        own_s = [
            sum(s.end - s.begin for s in t.segments if s.part == part and not s.waits) / len(t.ends) for t in traces
        ]
        work_s = [sum(t.work_s.get(part, {}).values()) for t in traces]
        shares[part] = max(0.0, 1 - sum(work_s) / sum(own_s)) if sum(own_s) and sum(work_s) else 0.0
    return shares


def shares_of(
    replay: Replay, host: Mapping[str, float], work: Mapping[str, Mapping[str, float]], pipeline: bool
) -> dict[str, float]:
    """Return the exclusive shares of all ranks' time in the played steps, whose sum is 1.

    A rank that is neither at work nor transferring waits for another: for a late rank, or in a pipeline for another stage.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for operation, s in replay.seconds.items():
        seconds[operation.kind] += s
    total = replay.base.seconds * replay.n_ranks
    shares = dict.fromkeys((*SHARES, *KINDS), 0.0)
    for kind, s in seconds.items():
        if kind in COMPUTING:
            shares["host"] += host[kind] * s / total
            of_kinds = work.get(kind, {})
            known = sum(of_kinds.values())
            for name in KINDS:
                share = of_kinds[name] / known if known else float(name == ELEMENTWISE)
                shares[name] += (1 - host[kind]) * share * s / total
        else:
            shares[kind if kind in SHARES else "host"] += s / total
    shares["bubble" if pipeline else "late rank"] += max(0.0, 1 - sum(shares.values()))
    return shares


def _computing(shares: Mapping[str, float]) -> float:
    return sum(shares.get(kind, 0.0) for kind in KINDS)
