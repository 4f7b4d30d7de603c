"""What `gptscale bench parts` is made of: a part of a step, the ways of computing it, and the shape that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptscale.common.settings.gpt_config import GPTConfig


class WayToCompute(NamedTuple):
    """One way of computing a part.

    run: forward and backward. forward: that alone, where it can be had. result: what is compared, from the same inputs for every
    way; None if `run` returns it.
    """

    name: str
    run: Callable[[], Sequence[Tensor]]
    forward: Callable[[], object] | None = None
    result: Callable[[], Sequence[Tensor]] | None = None


class StepPart(NamedTuple):
    """A part of a step, and its ways, of which the first is the measure of the others.

    bytes: what must move at least, forward and backward. flops: of its products, where those bound it.
    """

    name: str
    bytes: float
    flops: float
    ways: Sequence[WayToCompute]


class StepShape(NamedTuple):
    """The shape of the step whose parts are measured.

    compiled: whether to measure what torch.compile makes, too.
    """

    gpt: GPTConfig
    batch_size: int
    dtype: torch.dtype
    device: torch.device
    compiled: bool

    @property
    def rows(self) -> int:
        """Return the tokens of a step."""
        return self.batch_size * self.gpt.block_size

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of normally distributed numbers."""
        return torch.randn(size, device=self.device).to(dtype or self.dtype)


def differentiated(name: str, function: Callable[..., Any], leaves: Sequence[Tensor], *grads: Tensor) -> WayToCompute:
    """Return the way that calls a function of `leaves` and differentiates it.

    The function returns one or several values, whose gradients are `grads`.
    """

    def run() -> tuple[Tensor, ...]:
        output = function(*leaves)
        values = (output,) if isinstance(output, Tensor) else output
        return *(y.detach() for y in values), *torch.autograd.grad(values, leaves, grads)

    return WayToCompute(name, run, torch.no_grad()(partial(function, *leaves)))


def under_autocast(shape: StepShape, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function under autocast, as in a forward of the model."""

    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast(shape.device.type, shape.dtype, enabled=shape.dtype != torch.float32, cache_enabled=False):
            return function(*inputs)

    return run
