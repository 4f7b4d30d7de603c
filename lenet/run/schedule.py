"""Learning rates of vision runs as a function of the step: OneCycle here, cosine and constant as for the GPT."""

from __future__ import annotations

import math
from typing import Literal

from gptscale.common.settings.learning_rate import learning_rate

Schedule = Literal["constant", "cosine", "onecycle"]


def one_cycle(
    step: int, *, peak: float, total_steps: int, rise: float = 0.3, start_factor: float = 25.0, end_factor: float = 1e4
) -> float:
    """Return the OneCycle learning rate of 0-based `step`.

    It goes up by a half cosine from peak / start_factor to `peak`, then down by another to peak / start_factor / end_factor. This
    is torch.optim.lr_scheduler.OneCycleLR with its defaults, but without its cycle of momentum (Smith & Topin 2018, arXiv
    1708.07120). rise: the fraction of the steps in which the rate goes up.
    """
    low, lowest = peak / start_factor, peak / start_factor / end_factor
    top, last = rise * total_steps - 1, total_steps - 1
    if step <= top:
        return _half_cosine(low, peak, step / top if top > 0 else 1.0)
    return _half_cosine(peak, lowest, min(1.0, (step - top) / (last - top)))


def _half_cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * fraction))


def rate(schedule: Schedule, step: int, *, peak: float, total_steps: int, rise: float = 0.3) -> float:
    """Return the learning rate of 0-based `step` by the named schedule, where cosine falls to 0 without warm-up."""
    if schedule == "onecycle":
        return one_cycle(step, peak=peak, total_steps=total_steps, rise=rise)
    return learning_rate(step, peak=peak, total_steps=total_steps, schedule=schedule, min_ratio=0.0)
