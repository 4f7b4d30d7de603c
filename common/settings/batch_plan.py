"""Batch arithmetic: global_batch_size = micro_batch_size x grad_accum_steps x dp_size, solved for what the user left out."""

from __future__ import annotations

from dataclasses import dataclass

from gptscale.common.errors import ConfigError

DEFAULT_GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class BatchPlan:
    """One consistent split of a global batch, in sequences."""

    micro_batch_size: int
    grad_accum_steps: int
    dp_size: int
    global_batch_size: int

    @property
    def sequences_per_rank(self) -> int:
        return self.micro_batch_size * self.grad_accum_steps

    def describe(self) -> str:
        return (
            f"global batch {self.global_batch_size} = micro-batch {self.micro_batch_size} "
            f"x accumulation {self.grad_accum_steps} x data ranks {self.dp_size}"
        )


def plan_batch(
    dp_size: int,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    grad_accum_steps: int | None = None,
) -> BatchPlan:
    """Return the split of a global batch, in which what is None follows from the others.

    If all is None, the global batch is 8 sequences (or one per data rank where 8 does not divide), without accumulation.
    If only the global batch is known, there is no accumulation either. Raises ConfigError, with the nearest global batches
    that work, if the numbers contradict each other.
    """
    if global_batch_size is None:
        if micro_batch_size is None and grad_accum_steps is None:
            micro_batch_size = DEFAULT_GLOBAL_BATCH_SIZE // dp_size if DEFAULT_GLOBAL_BATCH_SIZE % dp_size == 0 else 1
        micro, accumulation = micro_batch_size or 1, grad_accum_steps or 1
        return BatchPlan(micro, accumulation, dp_size, micro * accumulation * dp_size)
    unit = (micro_batch_size or 1) * (grad_accum_steps or 1) * dp_size
    unit_is_all = micro_batch_size is not None and grad_accum_steps is not None
    if global_batch_size % unit or (unit_is_all and global_batch_size != unit):
        product = f"micro-batch {micro_batch_size or 'free'} x accumulation {grad_accum_steps or 'free'} x data ranks {dp_size}"
        what = f"global batch {global_batch_size} is not {'' if unit_is_all else 'a multiple of '}{unit} ({product})"
        fits = unit if unit_is_all else nearest_multiples(global_batch_size, unit)
        raise ConfigError(what, "in --global-batch-size", f"use {fits}")
    units = global_batch_size // unit
    micro = micro_batch_size or (units if grad_accum_steps is not None else global_batch_size // dp_size)
    accumulation = grad_accum_steps or global_batch_size // (micro * dp_size)
    return BatchPlan(micro, accumulation, dp_size, global_batch_size)


def nearest_multiples(number: int, unit: int) -> str:
    """Return in words the multiples of `unit` on both sides of a number that is no multiple."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
