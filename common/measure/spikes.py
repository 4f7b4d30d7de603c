"""Spikes: steps whose loss or gradient norm is far above those of the steps before.

Logarithms are compared, because chance multiplies a gradient norm: with small batches one of three times the mean is ordinary,
and seems to be seven standard deviations away if the norms themselves are compared.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gptscale.common.process.world import agree_any

WINDOW_STEPS = 128
# With fewer steps a standard deviation says little, and the loss of a new model still falls too fast.
STEPS_MIN = 32
DEVIATIONS_MAX = 6.0
# Large gradient norms come in groups. A spike is also this many times the highest of the last STEPS_MIN steps.
NORM_FACTOR = 2.0
# Losses of a constant batch hardly differ. The deviation of their logarithms is taken to be at least this, 0.5 % of a loss.
DEVIATION_MIN = 0.005


class Spike(NamedTuple):
    """A figure of a step, the geometric mean of the steps before, and how many of their standard deviations it is above that."""

    figure: str
    value: float
    mean: float
    deviations: float

    def __str__(self) -> str:
        return f"{self.figure} {self.value:.4g} is {self.deviations:.1f} standard deviations above the mean {self.mean:.4g}"


class SpikeWatch:
    """The losses and gradient norms of the last 128 steps, with which every new step is compared.

    skip: whether the optimizer asks `skips` before each step. Then `verdict` tells what was answered, step by step.
    A spike enters the statistics as a value that is just none, so that it hides no later spike, while a loss that stays high
    is soon an ordinary one.
    """

    def __init__(self, *, skip: bool = False) -> None:
        self.skip = skip
        self._recent: tuple[deque[float], deque[float]] = (deque(maxlen=WINDOW_STEPS), deque(maxlen=WINDOW_STEPS))
        self._answers: deque[Spike | None] = deque()

    def recent(self) -> list[list[float]]:
        """Return [losses, norms] for a checkpoint, so that a resumed run decides as one that never stopped."""
        return [list(values) for values in self._recent]

    def restore(self, recent: Any) -> None:
        """Take over `recent()` of a saved run. A checkpoint without it begins the statistics anew."""
        if not (isinstance(recent, list) and len(recent) == 2 and all(isinstance(values, list) for values in recent)):
            return
        for values, saved in zip(self._recent, recent, strict=True):
            values.extend(float(v) for v in saved if isinstance(v, (int, float)) and 0.0 < v < math.inf)

    def look(self, loss: float, norm: float) -> Spike | None:
        """Compare a step with those before, add it to them, and return the spike if it is one.

        Figures that are not finite are another fault, and do not count. Nor do those that have no logarithm.
        """
        if not (0.0 < loss < math.inf and 0.0 < norm < math.inf):
            return None
        spikes = []
        figures = ("loss", loss, 0.0), ("gradient norm", norm, NORM_FACTOR)
        for (figure, value, factor), values in zip(figures, self._recent, strict=True):
            if len(values) >= STEPS_MIN:
                logs = np.log(values)
                mean, deviation = float(logs.mean()), max(float(logs.std()), DEVIATION_MIN)
                excess = (math.log(value) - mean) / deviation
                high = factor * max(list(values)[-STEPS_MIN:])
                if excess > DEVIATIONS_MAX and value > high:
                    spikes.append(Spike(figure, value, math.exp(mean), excess))
                    value = min(math.exp(mean + DEVIATIONS_MAX * deviation), high or math.inf)
            values.append(value)
        return spikes[0] if spikes else None

    def skips(self, loss: Tensor, norm: Tensor) -> bool:
        """Return whether the optimizer must leave out the step with these figures, the same on every rank.

        The host waits for the figures. Ranks vote, so that rounding cannot divide them.
        """
        spike = self.look(float(loss), float(norm))
        skips = agree_any(spike is not None)
        self._answers.append((spike or Spike("loss", float(loss), math.nan, math.nan)) if skips else None)
        return skips

    def verdict(self, loss: float, norm: float) -> Spike | None:
        """Return the spike that the next step was, if it was one: what `skips` has answered, or a first look."""
        return self._answers.popleft() if self.skip else self.look(loss, norm)
