"""Max pooling in Python: element by element, as one would first write it, and all windows at once.

The loop is kept to learn from and to test against; the other is what runs where there is no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops.windows import Pair, memory_format, windows_over

# --- Element by element, as one would first write it: the teaching baseline


def loop_max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Every window of every channel in turn."""
    out_size = windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode)
    y = new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
    offsets = torch.full_like(y, -1, dtype=torch.int8)
    for plane in product(*map(range, x.shape[:-2])):
        for oh, ow in product(*map(range, out_size)):
            best, best_offset = -math.inf, -1
            for i, j in product(*map(range, kernel)):
                h, w = oh * stride[0] - padding[0] + i * dilation[0], ow * stride[1] - padding[1] + j * dilation[1]
                if 0 <= h < x.shape[-2] and 0 <= w < x.shape[-1]:
                    value = x[(*plane, h, w)].item()
                    if best_offset < 0 or value > best or math.isnan(value):
                        best, best_offset = value, i * kernel[1] + j
            y[(*plane, oh, ow)] = best
            offsets[(*plane, oh, ow)] = best_offset
    return y, offsets


def loop_max_pool2d_backward(
    grad: Tensor, offsets: Tensor, input_size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Every window's gradient to the element that was its maximum."""
    to_x = new(offsets, input_size, _wide(grad).dtype).zero_()
    for plane in product(*map(range, grad.shape[:-2])):
        for oh, ow in product(*map(range, grad.shape[-2:])):
            i, j = divmod(int(offsets[(*plane, oh, ow)]), kernel[1])
            h, w = oh * stride[0] - padding[0] + i * dilation[0], ow * stride[1] - padding[1] + j * dilation[1]
            if 0 <= i < kernel[0] and 0 <= h < input_size[-2] and 0 <= w < input_size[-1]:
                to_x[(*plane, h, w)] += grad[(*plane, oh, ow)]
    return to_x.to(grad.dtype)


# --- All windows at once, one place in the window after the other


def python_max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Element (i, j) of all windows is one strided slice of the padded input: compare those, kh kw of them."""
    out_size = windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode)
    below, right = (
        max(0, (n - 1) * s + (k - 1) * d + 1 - p - length)
        for n, k, s, p, d, length in zip(out_size, kernel, stride, padding, dilation, x.shape[-2:], strict=True)
    )
    padded = F.pad(x, (padding[1], right, padding[0], below), value=-math.inf)
    best = new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
    offsets = new(x, best.shape, torch.int8).copy_(
        _first_inside(x, out_size, kernel, stride, padding, dilation)  # where it stays if nothing beats -inf
    )
    for i, j in product(*map(range, kernel)):
        values = padded[_slice(i, j, out_size, stride, dilation)]
        better = (values > best) | values.isnan()
        best = torch.where(better, values, best)
        offsets = offsets.masked_fill(better, i * kernel[1] + j)
    return best.contiguous(memory_format=memory_format(x)), offsets.contiguous(memory_format=memory_format(x))


def _first_inside(x: Tensor, out_size: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """(out height, out width): the offset of each window's first element that is not padding, or -1."""
    firsts, inside = [], []
    for n, k, s, p, d, length in zip(out_size, kernel, stride, padding, dilation, x.shape[-2:], strict=True):
        start = torch.arange(n, device=x.device) * s - p
        firsts.append((-start).clamp(min=0).add(d - 1).div(d, rounding_mode="floor"))
        inside.append((firsts[-1] < k) & (start + firsts[-1] * d < length))
    offsets = firsts[0][:, None] * kernel[1] + firsts[1]
    found: Tensor = offsets.masked_fill(~(inside[0][:, None] & inside[1]), -1).to(torch.int8)
    return found


def python_max_pool2d_backward(
    grad: Tensor, offsets: Tensor, input_size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Into the padded gradient, for each place in the window: the windows' gradients whose maximum was there.

    From the last place to the first, so that an element's sum runs over its windows in their order.
    """
    out_size = (grad.shape[-2], grad.shape[-1])
    extent = [
        max((n - 1) * s + (k - 1) * d + 1, p + length)
        for n, k, s, p, d, length in zip(out_size, kernel, stride, padding, dilation, input_size[-2:], strict=True)
    ]
    wide = _wide(grad)
    padded = wide.new_zeros((*input_size[:-2], *extent))
    for i, j in reversed(list(product(*map(range, kernel)))):
        here = offsets == i * kernel[1] + j
        padded[_slice(i, j, out_size, stride, dilation)] += torch.where(here, wide, 0.0)
    (top, left), (height, width) = padding, input_size[-2:]
    cropped = padded[..., top : top + height, left : left + width]
    return new(offsets, input_size, grad.dtype).copy_(cropped)


def select(x: Tensor, offsets: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """x at the places the offsets point to, 0 for -1: what the derivative of the backward gives the output's gradient."""
    out_h, out_w = offsets.shape[-2:]
    number = offsets.long()
    rows = torch.arange(out_h, device=x.device)[:, None] * stride[0] - padding[0]
    columns = torch.arange(out_w, device=x.device) * stride[1] - padding[1]
    h = rows + number.div(kernel[1], rounding_mode="floor") * dilation[0]
    w = columns + number.remainder(kernel[1]) * dilation[1]
    at = torch.where(offsets < 0, 0, h * x.shape[-1] + w)
    values = x.flatten(-2).gather(-1, at.flatten(-2)).reshape(offsets.shape)
    return torch.where(offsets < 0, 0.0, values)


def _slice(i: int, j: int, out_size: Pair, stride: Pair, dilation: Pair) -> Any:
    return (
        ...,
        slice(i * dilation[0], i * dilation[0] + (out_size[0] - 1) * stride[0] + 1, stride[0]),
        slice(j * dilation[1], j * dilation[1] + (out_size[1] - 1) * stride[1] + 1, stride[1]),
    )


def new(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised, channels_last if `like` is."""
    return torch.empty(tuple(size), dtype=dtype, device=like.device, memory_format=memory_format(like))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class MaxPoolFunction(torch.autograd.Function):
    """(y, offsets); only the offsets are kept for the backward, not x."""

    @staticmethod
    def forward(
        x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool, implementation: str
    ) -> tuple[Tensor, Tensor]:
        pool = loop_max_pool2d if implementation == "loop" else python_max_pool2d
        return pool(x, kernel, stride, padding, dilation, ceil_mode)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, *ctx.geometry, _, ctx.implementation = inputs
        ctx.input_size = x.shape
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        function: Any = MaxPoolBackwardFunction
        return function.apply(grad, offsets, ctx.input_size, *ctx.geometry, ctx.implementation), *[None] * 6


class MaxPoolBackwardFunction(torch.autograd.Function):
    """The gradient to x: linear in the output's gradient, so its own derivative picks where it had put."""

    @staticmethod
    def forward(
        grad: Tensor,
        offsets: Tensor,
        input_size: Sequence[int],
        kernel: Pair,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        implementation: str,
    ) -> Tensor:
        backward = loop_max_pool2d_backward if implementation == "loop" else python_max_pool2d_backward
        return backward(grad, offsets, input_size, kernel, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, offsets, _, *ctx.geometry, _ = inputs
        ctx.save_for_backward(offsets)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return select(upstream, ctx.saved_tensors[0], *ctx.geometry), *[None] * 7
