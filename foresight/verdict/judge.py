"""The verdict on a run: its steps are replayed without each cause, and the largest that is worth a word is named."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gptscale.common.measure.evidence import RunEvidence
from gptscale.common.measure.step_trace import KINDS
from gptscale.foresight.verdict.calibrated import UNMEASURED, CalibratedRun
from gptscale.foresight.verdict.causes import CAUSES, COMPUTE_BOUND, CONTENDED, LATE, NO_CAUSE, WORDS, Steps

# A cause that gives less is not worth a word.
GAIN_MIN = 0.05
# From this share of computation on, a run without a cause is computing as it should.
COMPUTING_MIN = 0.6
# A late rank that costs so much of what others took is named instead of them.
LATE_OF_TAKEN = 0.8


@dataclass(frozen=True)
class SizedCause:
    """A cause, the seconds of a step without it, and its share of the step."""

    name: str
    without_s: float
    share: float


@dataclass(frozen=True)
class Verdict:
    """What limits a run.

    bound_by: one of WORDS. step_s: the median of the timed steps. spread: half the range from their p10 to their p90, divided by
    the median. traced_s: the mean traced step. shares: of the slowest rank's time in the traced steps, with the sum 1. causes:
    all that could be sized, the largest gain first. remedied_s: the step with the remedy, where that removes a part of the
    cause. differs: what of the machine is slower than its calibration. ranks: what each did in the last step by marks, as (what,
    begin, end). notes: what else was seen, a sentence each.
    """

    bound_by: str
    step_s: float
    spread: float
    traced_s: float
    shares: dict[str, float]
    causes: list[SizedCause]
    late_rank: int | None = None
    taken: float | None = None
    remedy: str = ""
    remedied_s: float | None = None
    differs: str = ""
    ranks: list[list[tuple[str, float, float]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def cause(self) -> SizedCause | None:
        return next((cause for cause in self.causes if cause.name == self.bound_by), None)

    def gain(self, cause: SizedCause) -> float:
        """Return the part of the step that removing a cause would save."""
        return max(0.0, 1 - cause.without_s / self.step_s)

    def columns(self) -> dict[str, Any]:
        """Return the columns of the summary row."""
        if self.cause is None:
            return {"bound_by": self.bound_by}
        figures = {"bound_share": self.cause.share, "gain_if_removed": self.gain(self.cause)}
        return {"bound_by": self.bound_by, **figures, "late_rank": self.late_rank}

    def line(self) -> str:
        rest = [words for words in (self.remedy, self.differs) if words]
        if self.cause is None:
            computing = sum(self.shares.get(kind, 0.0) for kind in KINDS)
            of_time = f"{computing:.0%} of the time is computation"
            words = of_time if self.bound_by == COMPUTE_BOUND.word else "no cause alone costs 5 %"
            return "; ".join([f"{self.bound_by}: {words}", *rest])
        who = f", rank {self.late_rank}" if self.late_rank is not None else ""
        times = f"a step of {1e3 * self.step_s:,.4g} ms would take {1e3 * self.cause.without_s:,.4g} without it"
        return "; ".join([f"{self.bound_by}{who}: {times} (-{self.gain(self.cause):.0%})", *rest])


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
