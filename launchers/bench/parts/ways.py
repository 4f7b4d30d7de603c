"""What `gptscale bench parts` is made of: a part of a step, the ways of computing it, and the shape they all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptscale.common.settings.gpt_config import GPTConfig


class Way(NamedTuple):
    """One way of computing a part.

    run: forward and backward. forward: that alone, where it can be had. result: what is compared, from the same inputs
    for every way; None if `run` returns it.
    """

    name: str
    run: Callable[[], Sequence[Tensor]]
    forward: Callable[[], object] | None = None
    result: Callable[[], Sequence[Tensor]] | None = None


class Part(NamedTuple):
    """A part of a step, and its ways, the first being the measure of the others.

    bytes: what must move at least, forward and backward; flops: its products, where those bound it.
    """

    name: str
    bytes: float
    flops: float
    ways: Sequence[Way]


class Shape(NamedTuple):
    """Of the step that the parts are of."""

    gpt: GPTConfig
    batch_size: int
    dtype: torch.dtype
    device: torch.device
    compiled: bool

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.gpt.block_size

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(size, device=self.device).to(dtype or self.dtype)


def differentiated(name: str, function: Callable[..., Any], leaves: Sequence[Tensor], *grads: Tensor) -> Way:
    """A function of one or several values, whose gradients are given, and its gradient in `leaves`."""

    def run() -> tuple[Tensor, ...]:
        found = function(*leaves)
        values = (found,) if isinstance(found, Tensor) else found
        return *(y.detach() for y in values), *torch.autograd.grad(values, leaves, grads)

    return Way(name, run, torch.no_grad()(partial(function, *leaves)))


def under_autocast(shape: Shape, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As in a forward of the model."""

    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast(shape.device.type, shape.dtype, enabled=shape.dtype != torch.float32, cache_enabled=False):
            return function(*inputs)

    return run
