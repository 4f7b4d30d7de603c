"""Products in bf16 or fp16 on a processor on which torch has no fast ones.

A processor may have no instructions for them, or torch may have no kernel that uses them. torch then takes its slowest loops:
VGG-19 trains 14 times slower in fp16 than in fp32. Here such products are computed in fp32 and rounded, as tensor cores do it:
the factors have the short type, the sum is fp32, and the result has the short type again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from time import thread_time
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
SHORT_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The gradient of a convolution's weights in oneDNN 3.10 with avx512_fp16 takes 57 times as long in fp16 as in fp32. Where there
# is a kernel for the short type, it takes 1.0 to 1.6 times as long.
SLOW_RATIO = 8.0


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


def gradient_seconds(dtype: torch.dtype, n_repeats: int = 3) -> float:
    """Return the processor seconds of one thread for the gradients of a small convolution, the least of `n_repeats`."""
    inputs, outputs = (
        torch.ones(8, 16, 8, 8, dtype=dtype).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    weight, sizes = torch.ones(16, 16, 3, 3, dtype=dtype), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    times, n_threads = [], torch.get_num_threads()
    # Threads that wait for each other would hide the difference on a busy machine.
    torch.set_num_threads(1)
    try:
        for _ in range(n_repeats):
            began = thread_time()
            ATEN.convolution_backward(outputs, inputs, weight, None, *sizes, [True, True, False])
            times.append(thread_time() - began)
    finally:
        torch.set_num_threads(n_threads)
    return min(times)


@cache
def has_slow_gradients(dtype: torch.dtype) -> bool:
    """Return whether torch's gradients of a convolution in `dtype` take many times as long as in fp32, measured once."""
    return gradient_seconds(dtype) > SLOW_RATIO * gradient_seconds(torch.float32)


def reason_to_round(precision: str, device: torch.device) -> str | None:
    """Return why products in `precision` are computed in fp32 and rounded on the device, or None if they are not."""
    if device.type != "cpu" or precision not in SHORT_TYPES:
        return None
    if is_emulated(precision):
        return f"this processor has no instructions for {precision}"
    if has_slow_gradients(SHORT_TYPES[precision]):
        return f"torch has no fast gradients of convolutions in {precision} on this processor"
    return None


def rounded_products(precision: str, dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a step computes, which does nothing where torch's own products in `precision` are fast."""
    return nullcontext() if reason_to_round(precision, device) is None else RoundedProducts(dtype)


def rounding_note(precision: str, device: torch.device) -> list[str]:
    """Return the line to print for a precision that is computed in fp32 and rounded, or no line for any other."""
    reason = reason_to_round(precision, device)
    return [] if reason is None else [f"{precision}     products in fp32, rounded: {reason}"]
