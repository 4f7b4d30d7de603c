"""The causes that a verdict may name: a row for each, with its word, how it is sized, and what to do about it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from gptscale.common.measure.evidence import RunEvidence, RunFacts
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.measure.step_trace import COMPUTING, HOST_MIN, TRANSFER, profiled_processor
from gptscale.foresight.verdict.calibrated import CalibratedRun
from gptscale.foresight.verdict.replay import Factor, Replay
from gptscale.foresight.verdict.shares import (
    BUBBLE_SHARE,
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

# In a pipeline stages are never quite equal. Elsewhere ranks do the same work.
LATE_RATIO = {True: 1.5, False: 1.1}
# DeepSpeed's stages from 2 on average the gradients of each micro-batch, so that only fewer micro-batches exchange less.
EXCHANGE_EACH = ("zero2", "zero3", "zero_offload", "zero_infinity")
# A pipeline whose micro-batches are single sequences gets so many times as many.
MORE_MICRO_BATCHES = 4


class Steps:
    """The steps of a run, from which causes are sized.

    shares: of the slowest rank. host: the host's share of each computing part. late: the rank with `late_ratio` times the work of
    the others. traced_s: the mean traced step. median_s: that of the timed steps.
    """

    def __init__(self, evidence: RunEvidence, calibrated: CalibratedRun) -> None:
        self.facts, self.taken, ranks = evidence.facts, evidence.taken, evidence.ranks
        traces, threads = [rank.trace for rank in ranks], not self.facts.cuda
        self.replay = Replay(traces, [rank.data_wait_s for rank in ranks], threads=threads)
        # The profiler does not see the operations that torch.compile makes for a CPU.
        unseen = self.facts.compiled and not self.facts.cuda
        self.host = dict.fromkeys(COMPUTING, 0.0) if unseen else host_shares(traces, threads=threads)
        processor = [profiled_processor(trace, threads=threads) for trace in traces]
        shares = shares_of(self.replay, self.host, self.facts.pipeline)
        self.shares = slowed(shares, calibrated.times_slower(traces, processor))
        self.traced_s, self.median_s = self.replay.step_s(), statistics.median(evidence.step_times_s)
        # Without what the timed steps say of a late rank, the traced ones tell.
        self.late, self.late_ratio = self.replay.most_own_work()
        if evidence.late is not None:
            late, self.late_ratio = evidence.late
            self.late = next((i for i, trace in enumerate(traces) if trace.rank == late), self.late)
        with_right_threads = (rank.right_threads_s for rank in ranks if rank.right_threads_s is not None)
        self.right_threads_s = max(with_right_threads, default=None)
        # Times that do not shrink with the tokens, where measured. Short products and exchanges are slow without a host too.
        measured = {part: statistics.fmean(rank.fixed[part] for rank in ranks) for part in ranks[0].fixed}
        self.fixed = self.host | measured if self.shares["host"] >= HOST_MIN else self.host

    def left_s(self, factor: Factor = lambda piece: 1.0, *, ranks_wait: bool = True) -> float:
        """Return the seconds of a traced step without one cause. What other programs add to that cause is left in."""
        contended = self.taken is not None and self.taken > TAKEN_MAX and not self.facts.cuda
        alone = with_processors(self.replay) if contended else without("")
        removed_s = self.replay.step_s(lambda piece: factor(piece) * alone(piece), ranks_wait=ranks_wait)
        return self.traced_s - self.replay.step_s(alone) + removed_s

    def timed(self, seconds: float) -> float:
        """Return the timed step that belongs to a traced one."""
        return self.median_s * min(1.0, seconds / self.traced_s)

    def computed(self, seconds: float) -> float:
        """Return the timed step that belongs to a traced one, if its machine has the processors for that."""
        return self.timed(max(seconds, self.replay.processors_s()))


@dataclass(frozen=True)
class Cause:
    """A cause that a verdict may name.

    size: the seconds of a timed step without it, and its share of the step, None where a run cannot have it. remedy: what to do
    about it, empty where there is nothing to do. remedied: the facts that the remedy then depends on, and the step with it where
    it removes a part of the cause. spreads: a gain counts if it is more than so many times the spread of the steps.
    """

    word: str
    size: Callable[[Steps], tuple[float, float] | None] = lambda steps: None
    remedy: Callable[[RunFacts], str] = lambda facts: ""
    remedied: Callable[[Steps], tuple[RunFacts, float | None]] = lambda steps: (steps.facts, None)
    spreads: float = 1.0


def _of_pieces(kind: str) -> Callable[[Steps], tuple[float, float]]:
    """Return the function that sizes a cause which consists of all pieces of one kind."""
    return lambda steps: (steps.computed(steps.left_s(without(kind))), steps.shares[kind])


def _of_host(steps: Steps) -> tuple[float, float]:
    host = {part: share for part, share in steps.fixed.items() if part != TRANSFER}
    return steps.timed(steps.replay.step_s(without_host(host))), steps.shares["host"]


def _of_bubble(steps: Steps) -> tuple[float, float] | None:
    if not steps.facts.pipeline:
        return None
    return steps.computed(steps.left_s(ranks_wait=False)), steps.shares[BUBBLE_SHARE]


def _of_late_rank(steps: Steps) -> tuple[float, float] | None:
    ratio_min = LATE_RATIO[steps.facts.pipeline]
    if steps.late_ratio < ratio_min:
        return None
    usual_s = steps.replay.step_s(with_rank_as_others(steps.replay, steps.late, ratio_min))
    return steps.computed(usual_s), waiting_for(steps.replay, steps.late)


def _of_others(steps: Steps) -> tuple[float, float] | None:
    taken, replay = steps.taken, steps.replay
    if taken is None or taken <= TAKEN_MAX:
        return None
    # The traced steps may have had the machine for themselves. What their threads had of a processor is all they need, unless a
    # rank's own threads took it from each other.
    if steps.facts.cuda or steps.right_threads_s is not None:
        return steps.median_s * (1 - taken), taken
    return min(steps.median_s, max(replay.step_s(with_processors(replay)), replay.processors_s())), taken


def _of_threads(steps: Steps) -> tuple[float, float] | None:
    if steps.right_threads_s is None:
        return None
    right_s = min(steps.median_s, steps.right_threads_s)
    return right_s, 1 - right_s / steps.median_s


def _against_data(facts: RunFacts) -> str:
    if facts.recipe:
        return "tokenize once: gptscale tokenize INPUT --out FILE.bin, then --data FILE.bin"
    return "try --loader fast" if facts.slow_loader else ""


def _against_links(facts: RunFacts) -> str:
    if not facts.recipe:
        return f"try --batch-size {2 * facts.micro_batch_size}"
    if facts.recipe == "fsdp":
        return f"try {'--no-sync-every-micro-batch' if facts.grad_accum_steps > 1 else '--no-reshard-after-forward'}"
    if facts.recipe in EXCHANGE_EACH and facts.grad_accum_steps > 1:
        return _one_micro_batch(facts)
    if facts.recipe in ("tensor_parallel", "hybrid_3d", *EXCHANGE_EACH):
        return f"try --micro-batch-size {2 * facts.micro_batch_size}"
    return f"try --micro-batch-size {facts.micro_batch_size} --grad-accum-steps {2 * facts.grad_accum_steps}"


def _one_micro_batch(facts: RunFacts) -> str:
    return f"try --micro-batch-size {facts.micro_batch_size * facts.grad_accum_steps} --grad-accum-steps 1"


def _against_copies(facts: RunFacts) -> str:
    return f"try --grad-accum-steps {2 * facts.grad_accum_steps}" if facts.recipe else ""


def _against_pressure(facts: RunFacts) -> str:
    if not facts.recipe:
        return f"try --batch-size {max(1, facts.micro_batch_size // 2)}"
    if facts.micro_batch_size > 1:
        return f"try --micro-batch-size {facts.micro_batch_size // 2}"
    return "try --activation-checkpointing full"


def _against_host(facts: RunFacts) -> str:
    if not facts.recipe:
        return f"try --batch-size {2 * facts.micro_batch_size}"
    if facts.grad_accum_steps > 1 and not facts.pipeline:
        return _one_micro_batch(facts)
    return "try --compile --compile-mode reduce-overhead" if facts.cuda else "try --compile"


def _with_one_batch(steps: Steps) -> tuple[RunFacts, float | None]:
    """Return the step whose micro-batches are one, where there are more."""
    facts = steps.facts
    if facts.grad_accum_steps == 1 or facts.pipeline:
        return facts, None
    return facts, steps.timed(steps.replay.step_s(with_one_micro_batch(steps.fixed, facts.grad_accum_steps)))


def _against_bubble(facts: RunFacts) -> str:
    if facts.micro_batch_size == 1:
        return f"try --grad-accum-steps {MORE_MICRO_BATCHES * facts.grad_accum_steps}"
    sequences = facts.micro_batch_size * facts.grad_accum_steps
    n = facts.best_micro_batches or sequences
    return f"try --micro-batch-size {sequences // n} --grad-accum-steps {n}"


def _with_more_micro_batches(steps: Steps) -> tuple[RunFacts, float]:
    """Return the facts with the best number of micro-batches, and the step with so many."""
    facts, filled_s = steps.facts, steps.replay.step_s(ranks_wait=False)
    if facts.micro_batch_size == 1:
        # For as many tokens. A larger batch has more micro-batches, and the same bubble.
        return facts, steps.timed(filled_s + (steps.traced_s - filled_s) / MORE_MICRO_BATCHES)
    sequences = facts.micro_batch_size * facts.grad_accum_steps
    host_s = filled_s - steps.replay.step_s(without_host(steps.host), ranks_wait=False)
    steps_s = {}
    for n in (n for n in range(facts.grad_accum_steps + 1, sequences + 1) if sequences % n == 0):
        # A bubble is as long as a micro-batch, of which each has its own cost for the host.
        times = n / facts.grad_accum_steps
        steps_s[n] = filled_s + (steps.traced_s - filled_s) / times + host_s * (times - 1)
    best = min(steps_s, key=lambda n: steps_s[n])
    return replace(facts, best_micro_batches=best), steps.timed(steps_s[best])


LATE = Cause(
    "communication-bound (late rank)",
    _of_late_rank,
    lambda facts: "see what else runs on its machine (gptscale doctor --nodes)",
)
# Others on the machine, and threads that wait for each other, make steps differ, so that the spread says nothing against these.
CONTENDED = Cause(
    "contended", _of_others, lambda facts: "wait until the machine is free, or measure on another one", spreads=0.0
)
CAUSES = (
    Cause("data-bound", _of_pieces("data"), _against_data),
    Cause("communication-bound (links)", _of_pieces(TRANSFER), _against_links),
    Cause(
        "offload-bound (disk)",
        _of_pieces("disk"),
        lambda facts: "keep the state in host memory (gptscale run zero_offload), or on a faster disk (--nvme-path)",
    ),
    Cause("offload-bound (bus)", _of_pieces("bus"), _against_copies),
    Cause("memory-pressed", _of_pieces("allocator"), _against_pressure),
    # It is a difference of steps that were measured apart, whose spread is larger.
    Cause("launch-bound", _of_host, _against_host, _with_one_batch, spreads=math.sqrt(2)),
    Cause("bubble-bound", _of_bubble, _against_bubble, _with_more_micro_batches),
    LATE,
    CONTENDED,
    Cause("thread-bound", _of_threads, lambda facts: f"try OMP_NUM_THREADS={facts.right_threads}", spreads=0.0),
)
COMPUTE_BOUND = Cause(
    "compute-bound", remedy=lambda facts: "try --compile" if facts.recipe and facts.cuda and not facts.compiled else ""
)
NO_CAUSE = Cause("no single cause")
WORDS = {cause.word: cause for cause in (*CAUSES, COMPUTE_BOUND, NO_CAUSE)}
