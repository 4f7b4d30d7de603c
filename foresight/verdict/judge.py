"""Judge traced steps: size each cause by playing the steps without it, and name the largest that is worth a word."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gptscale.common.measure.evidence import RunEvidence
from gptscale.common.measure.step_trace import KINDS
from gptscale.foresight.verdict.calibrated import UNMEASURED, CalibratedRun
from gptscale.foresight.verdict.causes import CAUSES, COMPUTE_BOUND, CONTENDED, LATE, NO_CAUSE, WORDS, Steps
from gptscale.foresight.verdict.verdict import SizedCause, Verdict

# A cause that gives less is not worth a word.
GAIN_MIN = 0.05
# From this share of computation on, a run without a cause is computing as it should.
COMPUTING_MIN = 0.6
# A late rank that costs so much of what others took is named instead of them.
LATE_OF_TAKEN = 0.8


def judge(evidence: RunEvidence, calibrated: CalibratedRun = UNMEASURED) -> Verdict:
    """Return the verdict on a run. calibrated: what the calibration of its machine expects."""
    steps = Steps(evidence, calibrated)
    sizes = [(cause.word, cause.size(steps)) for cause in CAUSES]
    causes = sorted((SizedCause(word, *size) for word, size in sizes if size), key=lambda cause: cause.without_s)
    spread = spread_of(evidence.step_times_s)
    without_one = COMPUTE_BOUND if sum(steps.shares[kind] for kind in KINDS) >= COMPUTING_MIN else NO_CAUSE
    cause = WORDS[named(causes, steps.median_s, spread) or without_one.word]
    facts, remedied_s = cause.remedied(steps)
    return Verdict(
        bound_by=cause.word,
        step_s=steps.median_s,
        spread=spread,
        traced_s=steps.traced_s,
        shares=steps.shares,
        causes=causes,
        late_rank=evidence.ranks[steps.late].trace.rank if cause is LATE else None,
        taken=evidence.taken,
        remedy=cause.remedy(facts),
        remedied_s=remedied_s,
        differs=calibrated.slow_exchange(steps.replay),
        ranks=steps.replay.last_step(),
        notes=list(evidence.notes),
    )


def spread_of(step_times_s: Sequence[float]) -> float:
    """Return half the range from p10 to p90 of the steps, divided by their median."""
    ordered = sorted(step_times_s)
    return (ordered[-1 - len(ordered) // 10] - ordered[len(ordered) // 10]) / 2 / statistics.median(ordered)


def named(causes: Sequence[SizedCause], step_s: float, spread: float) -> str | None:
    """Return the word of the cause to name, None if none is worth it.

    If others on the machine slow one rank down, and that rank is all that they cost, it is named.
    """
    gains = {cause.name: 1 - cause.without_s / step_s for cause in causes}
    spreads = {cause.word: cause.spreads * spread for cause in CAUSES}
    if CONTENDED.word in gains:
        spreads[LATE.word] = 0.0
    worth = {word: gain for word, gain in gains.items() if gain >= GAIN_MIN and gain > spreads[word]}
    if worth.get(LATE.word, 0.0) >= LATE_OF_TAKEN * worth.get(CONTENDED.word, 0.0):
        worth.pop(CONTENDED.word, None)
    return max(worth, key=lambda word: worth[word], default=None)
