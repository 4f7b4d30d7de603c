"""Convolution + bias + ReLU for GPUs, in Triton: an implicit matrix product with bias and ReLU before the only store.

    y[m, o] = relu(sum over k of x[m, k] w[k, o] + b[o]),  m an output pixel (image, row, column), k a (row, column, channel) of
    its window

The matrix x[m, k] never exists. Each tile is loaded from the windows in the input, with zeros for padding. In the backward,
one pass computes the mask and the bias gradient, which is summed in two stages, in a fixed order and without atomics. So it
has the same bits in each run. The gradients of x and weight are the library's (cuDNN, through aten::convolution_backward).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gptscale.ops.conv_python import convolution_backward
from gptscale.ops.windows import Pair, constants, memory_format, windows_over

# Output pixels and output channels of a program, and the elements of a window that one step takes.
BLOCK_M, BLOCK_N, BLOCK_K = 128, 64, 32
# In the backward, a program takes STEPS tiles of ROWS x COLUMNS.
ROWS, COLUMNS, STEPS = 8, 128, 16


@triton.jit
def _forward_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    pixels,
    out_channels,
    height,
    width,
    out_height,
    out_width,
    x_image,
    x_channel,
    x_row,
    x_column,
    w_out,
    w_channel,
    w_row,
    w_column,
    y_image,
    y_channel,
    y_row,
    y_column,
    IN_CHANNELS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of the output for the channels of one group.

    The group is program_id(2). Strides are in elements.
    """
    group = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    image = (m // out_width // out_height).to(tl.int64)
    oh = m // out_width % out_height
    ow = m % out_width
    x_start = x_ptr + image * x_image + group * IN_CHANNELS * x_channel
    w_start = w_ptr + (group * out_channels + o) * w_out
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    LENGTH: tl.constexpr = IN_CHANNELS * KERNEL_H * KERNEL_W
    for first in range(0, LENGTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        channel = k % IN_CHANNELS
        i = k // IN_CHANNELS // KERNEL_W
        j = k // IN_CHANNELS % KERNEL_W
        h = oh[:, None] * STRIDE_H - PADDING_H + i[None, :] * DILATION_H
        w = ow[:, None] * STRIDE_W - PADDING_W + j[None, :] * DILATION_W
        inside = (m[:, None] < pixels) & (k[None, :] < LENGTH) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        x_at = x_start[:, None] + channel[None, :] * x_channel + h * x_row + w * x_column
        w_at = w_start[None, :] + (channel * w_channel + i * w_row + j * w_column)[:, None]
        x = tl.load(x_at, mask=inside, other=0.0)
        weight = tl.load(w_at, mask=(k[:, None] < LENGTH) & (o[None, :] < out_channels), other=0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    bias = tl.load(b_ptr + group * out_channels + o, mask=o < out_channels, other=0.0).to(tl.float32)
    total += bias[None, :]
    # NaN stays NaN.
    y = tl.where(total <= 0.0, 0.0, total)
    pixel = y_ptr + image * y_image + oh * y_row + ow * y_column
    y_at = pixel[:, None] + ((group * out_channels + o) * y_channel)[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(m[:, None] < pixels) & (o[None, :] < out_channels))


@triton.jit
def _mask_kernel(
    g_ptr,
    y_ptr,
    masked_ptr,
    sums_ptr,
    rows,
    columns,
    OVER_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Mask the gradients of a matrix rows x columns, and sum them over STEPS tiles along rows or columns.

    A channels_last tensor is the matrix pixels x channels, summed over rows. A contiguous tensor is the matrix
    (image, channel) x pixels, summed over columns.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS * (STEPS if OVER_ROWS else 1) + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS * (1 if OVER_ROWS else STEPS) + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(STEPS):
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        at = row[:, None] * columns + column[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        masked = tl.where(y <= 0.0, 0.0, g)
        tl.store(masked_ptr + at, masked.to(masked_ptr.dtype.element_ty), mask=inside)
        total += masked
        if OVER_ROWS:
            row += ROWS
        else:
            column += COLUMNS
    if OVER_ROWS:
        tl.store(
            sums_ptr + tl.program_id(0).to(tl.int64) * columns + column, tl.sum(total, axis=0), mask=column < columns
        )
    else:
        tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * rows + row, tl.sum(total, axis=1), mask=row < rows)


def conv_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Return relu(x * w + b) in x's layout, with TF32 for fp32 where PyTorch's convolutions may use it."""
    out, channels, *kernel = weight.shape
    size = (x.shape[0], out, *windows_over(x.shape, kernel, stride, padding, dilation))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    bias, pixels = bias.contiguous(), size[0] * size[2] * size[3]
    if not pixels:
        return y
    grid = (triton.cdiv(pixels, BLOCK_M), triton.cdiv(out // groups, BLOCK_N), groups)
    _forward_kernel[grid](
        *(x, weight, bias, y, pixels, out // groups, *x.shape[2:], *size[2:]),
        *(*x.stride(), *weight.stride(), *y.stride()),
        **constants(kernel, stride, padding, dilation),
        IN_CHANNELS=channels,
        PRECISION="tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=3,
    )
    return y


def mask_and_sum(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return grad where not y <= 0, else 0, in y's layout, and its sum over all dimensions but channels."""
    layout = memory_format(y)
    grad, y = grad.contiguous(memory_format=layout), y.contiguous(memory_format=layout)
    masked = torch.empty_like(y)
    if not y.numel():
        return masked, y.new_zeros(y.shape[1])
    images, channels, height, width = y.shape
    over_rows = layout is torch.channels_last
    rows, columns = (images * height * width, channels) if over_rows else (images * channels, height * width)
    grid = (
        triton.cdiv(rows, ROWS * (STEPS if over_rows else 1)),
        triton.cdiv(columns, COLUMNS * (1 if over_rows else STEPS)),
    )
    parts = (grid[0], columns) if over_rows else (grid[1], images, channels)
    sums = torch.empty(parts, dtype=torch.float32, device=y.device)
    _mask_kernel[grid](
        *(grad, y, masked, sums, rows, columns),
        OVER_ROWS=over_rows,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STEPS=STEPS,
        num_warps=4,
    )
    return masked, sums.flatten(0, -2).sum(0).to(y.dtype)


def conv_bias_relu_backward(
    grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, *geometry_and_needs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `python_conv_bias_relu_backward` does."""
    *geometry, needs = geometry_and_needs
    masked, to_bias = mask_and_sum(grad, y)
    to_x, to_weight = convolution_backward(masked, x, weight, geometry, needs[:2])
    return to_x, to_weight, to_bias if needs[2] else grad.new_empty(0)
