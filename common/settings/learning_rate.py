"""The learning rate as a pure function of the step, so that nothing has to be saved and no engine owns a scheduler."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, schedule: str = "cosine", min_ratio: float = 0.1
) -> float:
    """Return the rate of 0-based `step`: linear from peak/warmup_steps up to `peak`, then constant or half a cosine.

    schedule: `constant` or `cosine`. The cosine (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts) reaches
    `min_ratio` x peak at the last step and stays there.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
