"""How long a step takes, and what makes it so long: the replay of the ranks that were simulated, in a few figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gptscale.foresight.price.cost import Costs
from gptscale.foresight.price.record import Work
from gptscale.foresight.price.replay import ATTENTION, COLLECTIVES, FORWARD, PRODUCTS, Replayed, replay

# How far the times of data sheets were from measured ones: docs/measurements/step-times.md.
SPREAD = 1.2
NAMES_SHOWN = 4


@dataclass(frozen=True)
class PricedStep:
    """One rank's step, in seconds.

    mfu: the products and attention of three forwards, or of all if these are less, as a share of the device's peak. hfu: of all.
    busy: of each kind of work, as if it ran alone. only_sends: in which the device communicates and computes nothing. idle: in
    which it does nothing. with_host_s: the length if the host asks as slowly as this machine's does beside the mock. guessed:
    kernels whose bytes nobody knows, by name.
    """

    step_s: float
    mfu: float
    hfu: float
    busy: dict[str, float]
    only_sends: float
    idle: float
    with_host_s: float
    guessed: dict[str, int]
    grade: str

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each kind of work, of what is communicated alone, and of waiting."""
        parts = {kind: seconds for kind, seconds in self.busy.items() if kind != COLLECTIVES}
        return parts | {"communication": self.only_sends, "waiting": self.idle}

    @property
    def bound(self) -> str:
        return max(self.parts, key=lambda kind: self.parts[kind])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "low_s": self.step_s / SPREAD, "high_s": self.step_s * SPREAD, "bound_by": self.bound}


def step_times(works: Mapping[int, Sequence[Work]], costs: Costs, host_s: Mapping[int, float]) -> dict[int, PricedStep]:
    """Return the time of each rank that was recorded. Ranks that send to each other are replayed together."""
    steps, slower = (replay(works, costs, each) for each in (dict.fromkeys(works, 0.0), host_s))
    return {rank: priced(step, slower[rank].step_s, costs) for rank, step in steps.items()}


def main_precision(works: Sequence[Work]) -> str:
    """Return the precision in which most is computed."""
    precisions = Counter[str]()
    for work in works:
        precisions[work.precision] += int(work.flops)
    return max(precisions, key=lambda precision: precisions[precision], default="bf16")


def priced(step: Replayed, with_host_s: float, costs: Costs, precision: str = "") -> PricedStep:
    """Return a replayed step in figures: shares of the peak of `precision`, even where most is computed in a slower one.

    with_host_s: how long it is with a host as slow as this machine's.
    """
    computing = [span.work for span in step.spans if span.kind in (PRODUCTS, ATTENTION)]
    peak = max(costs.peak(name) for name in (main_precision(computing), precision) if name)
    forward = sum(work.flops for work in computing if work.part == FORWARD)
    every = sum(work.flops for work in computing)
    guessed = Counter(s.work.name for s in step.spans if s.work.nbytes is None and s.work.kind == "kernel")
    return PricedStep(
        step.step_s,
        min(3 * forward, every) / peak / step.step_s,
        every / peak / step.step_s,
        step.busy(),
        step.only_sends,
        step.idle,
        with_host_s,
        dict(guessed.most_common(NAMES_SHOWN)),
        costs.grade,
    )
