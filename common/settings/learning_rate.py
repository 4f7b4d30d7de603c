"""The learning rate as a pure function of the step, so that nothing has to be saved and no engine owns a scheduler."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    schedule: str = "cosine",
    min_ratio: float = 0.1,
    decay_from: int | None = None,
) -> float:
    """Return the rate of 0-based `step`: linear from peak/warmup_steps up to `peak`, then what the schedule says.

    schedule: `constant`, `cosine` (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts) or `wsd` (Hu et al. 2024, arXiv
    2404.06395): a line down from step `decay_from`, by default nine tenths of all. Both end at `min_ratio` x peak.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    is_wsd, falls = schedule == "wsd", total_steps * 9 // 10 if decay_from is None else decay_from
    begin = max(warmup_steps, falls) if is_wsd else warmup_steps
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - 1 - begin))
    left = 1 - progress if is_wsd else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * left)
