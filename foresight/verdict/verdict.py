"""A verdict: what limits the speed of a run, what removing that would give, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gptscale.common.measure.step_trace import KINDS
from gptscale.foresight.verdict.causes import COMPUTE_BOUND, NO_CAUSE


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
    cause. differs: what of the
    machine is slower than its calibration. ranks: what each did in the last step by marks, as (what, begin, end). notes: what
    else was seen, a sentence each.
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
            words = {
                COMPUTE_BOUND.word: f"{computing:.0%} of the time is computation",
                NO_CAUSE.word: "no cause alone costs 5 %",
            }
            return "; ".join([f"{self.bound_by}: {words[self.bound_by]}", *rest])
        who = f", rank {self.late_rank}" if self.late_rank is not None else ""
        times = f"a step of {1e3 * self.step_s:,.4g} ms would take {1e3 * self.cause.without_s:,.4g} without it"
        return "; ".join([f"{self.bound_by}{who}: {times} (-{self.gain(self.cause):.0%})", *rest])
