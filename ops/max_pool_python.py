"""Max pooling in Python, three times: element by element, window by window, and for all windows at once.

The two loops are there to learn from and to test against. The last runs where there is no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops.windows import Pair, memory_format, windows_over


def _window(
    oh: int, ow: int, size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Iterator[tuple[int, int, int]]:
    """Yield the offset, the row and the column of each element of window (oh, ow) that is no padding."""
    for i, j in product(*map(range, kernel)):
        h, w = oh * stride[0] - padding[0] + i * dilation[0], ow * stride[1] - padding[1] + j * dilation[1]
        if 0 <= h < size[-2] and 0 <= w < size[-1]:
            yield i * kernel[1] + j, h, w


# --- Element by element, the simplest way to write it


def loop_max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return maxima and offsets, one window of one channel after the other."""
    out_size = windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode)
    y = new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
    offsets = torch.full_like(y, -1, dtype=torch.int8)
    for plane in product(*map(range, x.shape[:-2])):
        for oh, ow in product(*map(range, out_size)):
            best, best_offset = -math.inf, -1
            for offset, h, w in _window(oh, ow, x.shape, kernel, stride, padding, dilation):
                value = x[(*plane, h, w)].item()
                if best_offset < 0 or value > best or math.isnan(value):
                    best, best_offset = value, offset
            y[(*plane, oh, ow)] = best
            offsets[(*plane, oh, ow)] = best_offset
    return y, offsets


def loop_max_pool2d_backward(
    grad: Tensor, offsets: Tensor, input_size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the input's gradient: each window adds its gradient to the element that was its maximum."""
    to_x = new(offsets, input_size, _wide(grad).dtype).zero_()
    for plane in product(*map(range, grad.shape[:-2])):
        for oh, ow in product(*map(range, grad.shape[-2:])):
            for offset, h, w in _window(oh, ow, input_size, kernel, stride, padding, dilation):
                if offset == offsets[(*plane, oh, ow)]:
                    to_x[(*plane, h, w)] += grad[(*plane, oh, ow)]
    return to_x.to(grad.dtype)


# --- Window by window, for all images and channels at once


def windows_max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return maxima and offsets, one window after the other."""
    out_size = windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode)
    y = new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
    offsets = torch.full_like(y, -1, dtype=torch.int8)
    for oh, ow in product(*map(range, out_size)):
        for offset, h, w in _window(oh, ow, x.shape, kernel, stride, padding, dilation):
            values, best, best_offsets = x[..., h, w], y[..., oh, ow], offsets[..., oh, ow]
            better = (values > best) | values.isnan() | (best_offsets < 0)
            y[..., oh, ow] = torch.where(better, values, best)
            offsets[..., oh, ow] = best_offsets.masked_fill(better, offset)
    return y, offsets


def windows_max_pool2d_backward(
    grad: Tensor, offsets: Tensor, input_size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the input's gradient: each window adds its gradients to the elements that were its maxima."""
    to_x = new(offsets, input_size, _wide(grad).dtype).zero_()
    for oh, ow in product(*map(range, grad.shape[-2:])):
        for offset, h, w in _window(oh, ow, input_size, kernel, stride, padding, dilation):
            to_x[..., h, w] += torch.where(offsets[..., oh, ow] == offset, grad[..., oh, ow], 0.0)
    return to_x.to(grad.dtype)


# --- All windows at once, one place of the window after the other


def python_max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return maxima and offsets by comparing strided slices of the padded input.

    Each of the kh kw slices holds element (i, j) of all windows.
    """
    out_size = windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode)
    below, right = (
        max(0, (n - 1) * s + (k - 1) * d + 1 - p - length)
        for n, k, s, p, d, length in zip(out_size, kernel, stride, padding, dilation, x.shape[-2:], strict=True)
    )
    around = (padding[1], right, padding[0], below)
    padded = F.pad(x, around, value=-math.inf)
    inside = F.pad(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device), around)
    best = new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
    offsets = torch.full_like(best, -1, dtype=torch.int8)
    for i, j in product(*map(range, kernel)):
        place = _slice(i, j, out_size, stride, dilation)
        values = padded[place]
        better = inside[place] & ((values > best) | values.isnan() | (offsets < 0))
        best = torch.where(better, values, best)
        offsets = offsets.masked_fill(better, i * kernel[1] + j)
    return best.contiguous(memory_format=memory_format(x)), offsets.contiguous(memory_format=memory_format(x))


def python_max_pool2d_backward(
    grad: Tensor, offsets: Tensor, input_size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the input's gradient, for all windows at once.

    For each place of the window, the gradients of the windows whose maximum was there are added to the padded gradient.
    The places are taken from the last to the first, so that an element's sum runs over its windows in their order.
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
    """Return the elements of x that the offsets point to, and 0 where the offset is -1.

    Applied to the gradient of the backward's result, this is the derivative of the backward.
    """
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
    """Return an uninitialised tensor on the device of `like`, channels_last if `like` is."""
    return torch.empty(tuple(size), dtype=dtype, device=like.device, memory_format=memory_format(like))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


FORWARDS = {"loop": loop_max_pool2d, "windows": windows_max_pool2d, "python": python_max_pool2d}
BACKWARDS = {
    "loop": loop_max_pool2d_backward,
    "windows": windows_max_pool2d_backward,
    "python": python_max_pool2d_backward,
}
