"""Products in bf16 or fp16 on a processor that has no instructions for them.

torch then takes its slowest loops: VGG-19 trains 14 times slower in fp16 than in fp32. Here such products are computed in fp32
and rounded, as tensor cores do it: the factors have the short type, the sum is fp32, and the result has the short type again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gptscale.common.measure.devices import is_emulated

ATEN = torch.ops.aten
PRODUCTS = (
    ATEN.convolution.default,
    ATEN.convolution_backward.default,
    ATEN.addmm.default,
    ATEN.mm.default,
)


class RoundedProducts(TorchDispatchMode):
    """Compute products of `dtype` in fp32 and round their results, in forward and in backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in PRODUCTS or args[0].dtype != self.dtype:
            return func(*args, **(kwargs or {}))
        wide = tree_map_only(torch.Tensor, torch.Tensor.float, (args, dict(kwargs or {})))
        return tree_map_only(torch.Tensor, lambda result: result.to(self.dtype), func(*wide[0], **wide[1]))


def rounded_products(precision: str, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a step computes, which does nothing where the device has instructions for `precision`."""
    if device.type == "cpu" and is_emulated(precision):
        return RoundedProducts(dtype)
    return nullcontext()


def rounding_note(precision: str, device: torch.device) -> list[str]:
    """Return the line to print for a precision that is computed in fp32 and rounded, or no line for any other."""
    if device.type == "cpu" and is_emulated(precision):
        return [f"{precision}     products in fp32, rounded: this processor has no instructions for {precision}"]
    return []
