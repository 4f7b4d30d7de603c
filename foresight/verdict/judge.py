"""Judge traced steps: size each cause by playing the steps without it, and name the largest that is worth a word."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from gptscale.common.measure.evidence import RunEvidence, RunFacts
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.measure.step_trace import COMPUTING, HOST_MIN, KINDS, TRANSFER, profiled_processor
from gptscale.foresight.verdict.calibrated import CalibratedRun
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
    MORE_MICRO_BATCHES,
    NO_CAUSE,
    THREADS,
    remedy,
)
from gptscale.foresight.verdict.replay import Replay
from gptscale.foresight.verdict.shares import (
    host_shares,
    shares_of,
    slowed,
    waiting_for,
    with_one_micro_batch,
    with_processors,
    with_rank_as_others,
    without,
    without_host,
)
from gptscale.foresight.verdict.verdict import Cause, Verdict

# A cause that gives less is not worth a word.
GAIN_MIN = 0.05
# From this share of computation on, a run without a cause is computing as it should.
COMPUTING_MIN = 0.6
# A late rank that costs so much of what others took is named instead of them.
LATE_OF_TAKEN = 0.8
# In a pipeline stages are never quite equal. Elsewhere ranks do the same work.
LATE_RATIO = {True: 1.5, False: 1.1}


def judge(evidence: RunEvidence, calibrated: CalibratedRun | None = None) -> Verdict:
    """Return the verdict on a run. calibrated: what the calibration of its machine expects, if there is one."""
    traces, facts = [rank.trace for rank in evidence.ranks], evidence.facts
    threads = not facts.cuda
    replay = Replay(traces, [rank.data_wait_s for rank in evidence.ranks], threads=threads)
    # The profiler does not see the operations that torch.compile makes for a CPU.
    unseen = facts.compiled and not facts.cuda
    host = dict.fromkeys(COMPUTING, 0.0) if unseen else host_shares(traces, threads=threads)
    shares = shares_of(replay, traces, host, facts.pipeline)
    differs = ""
    if calibrated is not None:
        processor = [profiled_processor(trace, threads=threads) for trace in traces]
        shares = slowed(shares, calibrated.times_slower(traces, processor))
        differs = calibrated.slow_exchange(replay, traces)
    # Without what the timed steps say of a late rank, the traced ones tell.
    late, ratio = replay.most_own_work()
    if evidence.late is not None:
        late = next((i for i, t in enumerate(traces) if t.rank == evidence.late[0]), late)
        ratio = evidence.late[1]
    sizes = Sizes(replay, evidence, shares, host)
    causes, spread = sizes.causes(late, ratio), spread_of(evidence.step_times_s)
    computes = sum(shares[kind] for kind in KINDS)
    word = named(causes, sizes.median_s, spread) or (COMPUTE_BOUND if computes >= COMPUTING_MIN else NO_CAUSE)
    facts, remedied_s = sizes.remedied(word)
    return Verdict(
        bound_by=word,
        step_s=sizes.median_s,
        spread=spread,
        traced_s=sizes.traced_s,
        shares=shares,
        causes=causes,
        late_rank=traces[late].rank if word == LATE else None,
        taken=evidence.taken,
        remedy=remedy(word, facts),
        remedied_s=remedied_s,
        differs=differs,
        ranks=replay.last_step(),
        notes=list(evidence.notes),
    )


def spread_of(step_times_s: Sequence[float]) -> float:
    """Return half the range from p10 to p90 of the steps, divided by their median."""
    ordered = sorted(step_times_s)
    return (ordered[-1 - len(ordered) // 10] - ordered[len(ordered) // 10]) / 2 / statistics.median(ordered)


class Sizes:
    """What a step takes without each cause, as a part of the timed steps' median.

    shares: of the slowest rank. host: the host's share of each computing part.
    """

    def __init__(
        self, replay: Replay, evidence: RunEvidence, shares: Mapping[str, float], host: Mapping[str, float]
    ) -> None:
        self.replay, self.shares, self.host = replay, shares, host
        self.facts, self.taken = evidence.facts, evidence.taken
        self.traced_s, self.median_s = replay.step_s(), statistics.median(evidence.step_times_s)
        ranks = evidence.ranks
        with_right_threads = (rank.right_threads_s for rank in ranks if rank.right_threads_s is not None)
        self.right_threads_s = max(with_right_threads, default=None)
        # Times that do not shrink with the tokens, where measured. Short products and exchanges are slow without a host too.
        measured = {part: statistics.fmean(rank.fixed[part] for rank in ranks) for part in ranks[0].fixed}
        self.fixed = {**host, **measured} if shares["host"] >= HOST_MIN else host

    def cause(self, name: str, seconds: float, share: float) -> Cause:
        """Return a cause without which a traced step takes `seconds`, if its machine has the processors for that."""
        return Cause(name, self.timed(max(seconds, 0.0 if name == LAUNCH else self.replay.processors_s())), share)

    def timed(self, seconds: float) -> float:
        """Return the timed step that belongs to a traced one."""
        return self.median_s * min(1.0, seconds / self.traced_s)

    def causes(self, late: int, ratio: float) -> list[Cause]:
        """Return all causes that can be sized, the largest first. late, ratio: a rank with so many times the others' work."""
        replay, shares, facts = self.replay, self.shares, self.facts
        causes = [
            self.cause(name, replay.step_s(without(kind)), shares[kind])
            for name, kind in ((DATA, "data"), (LINKS, TRANSFER), (DISK, "disk"), (BUS, "bus"), (MEMORY, "allocator"))
        ]
        host = {part: share for part, share in self.fixed.items() if part != TRANSFER}
        causes.append(self.cause(LAUNCH, replay.step_s(without_host(host)), shares["host"]))
        if facts.pipeline:
            causes.append(self.cause(BUBBLE, replay.step_s(ranks_wait=False), shares["bubble"]))
        ratio_min = LATE_RATIO[facts.pipeline]
        if ratio >= ratio_min:
            usual_s = replay.step_s(with_rank_as_others(replay, late, ratio_min))
            causes.append(self.cause(LATE, usual_s, waiting_for(replay, late)))
        if self.taken is not None and self.taken > TAKEN_MAX:
            # The traced steps may have had the machine for themselves. What their threads had of a processor is all they need,
            # unless a rank's own threads took it from each other.
            as_taken = facts.cuda or self.right_threads_s is not None
            alone_s = (
                self.median_s * (1 - self.taken)
                if as_taken
                else max(replay.step_s(with_processors(replay)), replay.processors_s())
            )
            causes.append(Cause(CONTENDED, min(self.median_s, alone_s), self.taken))
        if (right_s := self.right_threads_s) is not None:
            causes.append(Cause(THREADS, min(self.median_s, right_s), max(0.0, 1 - right_s / self.median_s)))
        return sorted(causes, key=lambda cause: cause.without_s)

    def remedied(self, word: str) -> tuple[RunFacts, float | None]:
        """Return the facts with the best number of micro-batches, and the step with the remedy, None if it removes all."""
        facts = self.facts
        if word == LAUNCH and facts.grad_accum_steps > 1 and not facts.pipeline:
            merged = with_one_micro_batch(self.fixed, facts.grad_accum_steps)
            return facts, self.timed(self.replay.step_s(merged))
        if word != BUBBLE:
            return facts, None
        sequences, filled_s = facts.micro_batch_size * facts.grad_accum_steps, self.replay.step_s(ranks_wait=False)
        if facts.micro_batch_size == 1:
            # For as many tokens. A larger batch has more micro-batches, and the same bubble.
            return facts, self.timed(filled_s + (self.traced_s - filled_s) / MORE_MICRO_BATCHES)
        host_s = filled_s - self.replay.step_s(without_host(self.host), ranks_wait=False)
        steps_s = {}
        for n in (n for n in range(facts.grad_accum_steps + 1, sequences + 1) if sequences % n == 0):
            # A bubble is as long as a micro-batch, of which each has its own cost for the host.
            times = n / facts.grad_accum_steps
            steps_s[n] = filled_s + (self.traced_s - filled_s) / times + host_s * (times - 1)
        best = min(steps_s, key=lambda n: steps_s[n])
        return dataclasses.replace(facts, best_micro_batches=best), self.timed(steps_s[best])


def named(causes: Sequence[Cause], step_s: float, spread: float) -> str | None:
    """Return the cause to name, None if none is worth it.

    Others on the machine, and threads that wait for each other, make steps differ, so that the spread says nothing against these.
    If others slow one rank down, and that rank is all that they cost, it is named. What the host costs is a difference of steps
    that were measured apart, whose spread is larger.
    """
    gains = {c.name: 1 - c.without_s / step_s for c in causes}
    uneven = {CONTENDED, THREADS} | ({LATE} if CONTENDED in gains else set())
    spreads = {LAUNCH: math.sqrt(2) * spread} | dict.fromkeys(uneven, 0.0)
    worth = {n: gain for n, gain in gains.items() if gain >= GAIN_MIN and gain > spreads.get(n, spread)}
    if LATE in worth and worth[LATE] >= LATE_OF_TAKEN * worth.get(CONTENDED, 0.0):
        worth.pop(CONTENDED, None)
    return max(worth, key=lambda name: worth[name], default=None)
