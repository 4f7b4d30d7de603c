"""Max pooling for GPUs, in Triton, with a thread per output element forward and a thread per input element backward.

In the backward, each input element adds up the gradients of the windows whose offset points to it, in the order of the
windows. There are no atomics, so the result has the same bits in each run, and an offset that points elsewhere is ignored. A
contiguous tensor is read as channels_last with one channel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptscale.ops.windows import Pair, constants, memory_format, windows_over

# elements of one program
BLOCK = 1024


@triton.jit
def _where(index, channels, width, height):
    """Return image, row, column and channel of an element.

    The image's number has 64 bits, because it is multiplied by the size of an image.
    """
    channel = index % channels
    pixel = index // channels
    return (pixel // width // height).to(tl.int64), pixel // width % height, pixel % width, channel


@triton.jit
def _forward_kernel(
    x_ptr,
    y_ptr,
    offsets_ptr,
    size,
    channels,
    height,
    width,
    out_height,
    out_width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    image, oh, ow, channel = _where(index, channels, out_width, out_height)
    start = x_ptr + image * height * width * channels + channel
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    offset = tl.full((BLOCK,), -1, tl.int32)
    for i in tl.static_range(KERNEL_H):
        for j in tl.static_range(KERNEL_W):
            h = oh * STRIDE_H - PADDING_H + i * DILATION_H
            w = ow * STRIDE_W - PADDING_W + j * DILATION_W
            inside = (index < size) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            value = tl.load(start + (h * width + w) * channels, mask=inside, other=0.0).to(tl.float32)
            better = inside & ((offset < 0) | (value > best) | (value != value))
            best = tl.where(better, value, best)
            offset = tl.where(better, i * KERNEL_W + j, offset)
    tl.store(y_ptr + index, best.to(y_ptr.dtype.element_ty), mask=index < size)
    tl.store(offsets_ptr + index, offset.to(tl.int8), mask=index < size)


@triton.jit
def _backward_kernel(
    g_ptr,
    offsets_ptr,
    gx_ptr,
    size,
    channels,
    height,
    width,
    out_height,
    out_width,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the gradients of all windows whose maximum is at an element.

    At most REACH_H x REACH_W windows reach an element: the last one that starts at or before it, and those before that.
    """
    REACH_H: tl.constexpr = (KERNEL_H - 1) * DILATION_H // STRIDE_H + 1
    REACH_W: tl.constexpr = (KERNEL_W - 1) * DILATION_W // STRIDE_W + 1
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    image, h, w, channel = _where(index, channels, width, height)
    start = image * out_height * out_width * channels + channel
    total = tl.zeros((BLOCK,), tl.float32)
    for a in tl.static_range(REACH_H):
        oh = (h + PADDING_H) // STRIDE_H - (REACH_H - 1 - a)
        down = h + PADDING_H - oh * STRIDE_H
        rows = (oh >= 0) & (oh < out_height) & (down <= (KERNEL_H - 1) * DILATION_H) & (down % DILATION_H == 0)
        for b in tl.static_range(REACH_W):
            ow = (w + PADDING_W) // STRIDE_W - (REACH_W - 1 - b)
            right = w + PADDING_W - ow * STRIDE_W
            columns = (ow >= 0) & (ow < out_width) & (right <= (KERNEL_W - 1) * DILATION_W) & (right % DILATION_W == 0)
            inside = (index < size) & rows & columns
            at = start + (oh * out_width + ow) * channels
            offset = tl.load(offsets_ptr + at, mask=inside, other=-1)
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
            here = offset == down // DILATION_H * KERNEL_W + right // DILATION_W
            total += tl.where(inside & here, g, 0.0)
    tl.store(gx_ptr + index, total.to(gx_ptr.dtype.element_ty), mask=index < size)


def max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return maxima and offsets, in x's layout."""
    layout = memory_format(x)
    x = x.contiguous(memory_format=layout)
    size = (*x.shape[:-2], *windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
    offsets = torch.empty_like(y, dtype=torch.int8)
    if n := y.numel():
        channels = x.shape[1] if layout is torch.channels_last else 1
        sizes = n, channels, *x.shape[-2:], *size[-2:]
        named = constants(kernel, stride, padding, dilation)
        _forward_kernel[(triton.cdiv(n, BLOCK),)](x, y, offsets, *sizes, **named, BLOCK=BLOCK)
    return y, offsets


def max_pool2d_backward(
    grad: Tensor, offsets: Tensor, input_size: Sequence[int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the input's gradient, in the layout of the offsets."""
    layout = memory_format(offsets)
    grad, offsets = grad.contiguous(memory_format=layout), offsets.contiguous(memory_format=layout)
    gx = torch.empty(tuple(input_size), dtype=grad.dtype, device=grad.device, memory_format=layout)
    if n := gx.numel():
        channels = input_size[1] if layout is torch.channels_last else 1
        sizes = n, channels, *gx.shape[-2:], *grad.shape[-2:]
        named = constants(kernel, stride, padding, dilation)
        _backward_kernel[(triton.cdiv(n, BLOCK),)](grad, offsets, gx, *sizes, **named, BLOCK=BLOCK)
    return gx
