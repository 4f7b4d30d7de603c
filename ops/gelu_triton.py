"""GELU and bias + GELU for GPUs, in Triton, by the formulas of csrc/gelu.inc in one pass over memory.

They are bound by memory, so every byte has to move only once: 2 times the size of x in the forward pass, 3 times in the
backward pass. The bias gradient is summed in two stages, first over blocks of rows and then over the blocks, in a fixed order
and without atomics. So it has the same bits in each run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VARIANTS = {"erf": 0, "tanh": 1, "sigmoid": 2}
# Elements of one program. In bf16, with 8 warps, each thread then loads 16 bytes at a time.
BLOCK = 2048
# The part of a bias gradient that one program computes.
COLUMNS, ROWS = 128, 256


@triton.jit
def _exp_minus(z, z_low):
    """Return exp(-(z + z_low)) as a mantissa and two powers of two.

    Their product is formed only at the end, so that results below 2^-126 are rounded once.
    """
    n = tl.floor(z * -1.4426950408889634 + 0.5)
    r = tl.fma(n, -0.693147182, -z)
    mantissa = tl.exp(n * 1.90465421e-09 + r - z_low)
    half = tl.floor(n * 0.5)
    return mantissa, tl.exp2(half), tl.exp2(n - half)


@triton.jit
def _argument(a, VARIANT: tl.constexpr):
    """Return z in two floats, and z'(a), where P(-a) is about exp(-z)."""
    if VARIANT == 0:
        square = a * a
        return 0.5 * square, 0.5 * tl.fma(a, a, -square), a
    elif VARIANT == 1:
        square = a * a
        square_low = tl.fma(a, a, -square)
        p = tl.fma(square, 0.0713548139, 1.59576917)
        p_low = tl.fma(square, 0.0713548139, 1.59576917 - p) + (square_low * 0.0713548139 - 4.53406805e-08)
        p_low += square * 2.39883247e-09
        z = a * p
        return z, tl.fma(a, p, -z) + a * p_low, 1.59576917 + 0.214064449 * square
    else:
        z = 1.70200002 * a
        return z, tl.fma(a, 1.70200002, -z) - 2.19345093e-08 * a, a * 0.0 + 1.702


@triton.jit
def _magnitude(x, VARIANT: tl.constexpr):
    """Return |x|, but at most the number for which exp(-z) is 0.

    NaN stays NaN.
    """
    a = tl.abs(x)
    if VARIANT == 0:
        return tl.where(a > 14.5, 14.5, a)
    elif VARIANT == 1:
        return tl.where(a > 10.8, 10.8, a)
    else:
        return tl.where(a > 64.0, 64.0, a)


@triton.jit
def _value(x, VARIANT: tl.constexpr):
    """Return x P(x), where x * 0 turns -Inf into NaN as PyTorch does."""
    a = _magnitude(x, VARIANT)
    z, z_low, _ = _argument(a, VARIANT)
    mantissa, high, low = _exp_minus(z, z_low)
    if VARIANT == 0:
        t = (a - 3.0) / (a + 3.0)
        p = 5.31619771e-05
        p = p * t + 0.000115013681
        p = p * t - 0.000339012913
        p = p * t - 0.000983288162
        p = p * t + 0.00290438742
        p = p * t + 0.00613194238
        p = p * t - 0.0462132618
        p = p * t + 0.123225041
        p = p * t - 0.206402615
        p = p * t + 0.121513948
        mantissa = mantissa * p
    else:
        mantissa = mantissa / (1.0 + mantissa * high * low)
    q = tl.where(x < 0, -a * mantissa, mantissa) * high * low
    return tl.where(x < 0, x * 0.0 + q, x * (1.0 - q))


@triton.jit
def _derivative(x, VARIANT: tl.constexpr):
    """Return P(x) + x P'(x)."""
    a = _magnitude(x, VARIANT)
    z, z_low, slope = _argument(a, VARIANT)
    mantissa, high, low = _exp_minus(z, z_low)
    if VARIANT == 0:
        t = (a - 3.5) / (a + 3.5)
        p = 3.73237017e-05
        p = p * t + 2.25959011e-05
        p = p * t - 0.000431385619
        p = p * t + 0.000243483315
        p = p * t + 0.00469542947
        p = p * t - 0.0220177025
        p = p * t + 0.0583289377
        p = p * t - 0.111316532
        p = p * t + 0.469379544
        mantissa = mantissa * p * (0.751791537 - a - 1.21144499e-08)
    else:
        v = 1.0 / (1.0 + mantissa * high * low)
        mantissa = mantissa * v * tl.fma(-a * v, slope, 1.0)
    d = x * 0.0 + mantissa * high * low
    return tl.where(x < 0, d, 1.0 - d)


@triton.jit
def _forward_kernel(x_ptr, y_ptr, n, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, _value(x, VARIANT).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _backward_kernel(g_ptr, x_ptr, gx_ptr, n, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(gx_ptr + at, (g * _derivative(x, VARIANT)).to(gx_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _bias_kernel(x_ptr, b_ptr, y_ptr, size, n, VARIANT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at % n, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, _value(x + b, VARIANT).to(y_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def _bias_backward_kernel(
    g_ptr, x_ptr, b_ptr, gx_ptr, sums_ptr, rows, n, VARIANT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute gx and a part of the bias gradient, for one block of columns over ROWS rows, 8 rows at a time."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(b_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    total = tl.zeros((8, COLUMNS), dtype=tl.float32)
    for first in range(0, ROWS, 8):
        row = tl.program_id(1).to(tl.int64) * ROWS + first + tl.arange(0, 8)
        at = row[:, None] * n + column[None, :]
        there = (row[:, None] < rows) & (column[None, :] < n)
        x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=there, other=0.0).to(tl.float32)
        gx = g * _derivative(x + b[None, :], VARIANT)
        tl.store(gx_ptr + at, gx.to(gx_ptr.dtype.element_ty), mask=there)
        total += gx
    tl.store(sums_ptr + tl.program_id(1).to(tl.int64) * n + column, tl.sum(total, axis=0), mask=column < n)


def _dense(x: Tensor) -> Tensor:
    """Return x without gaps in memory, in the order of dimensions that it has."""
    y = torch.empty_like(x)
    return x if y.stride() == x.stride() else y.copy_(x)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Return f(x)."""
    x = _dense(x)
    y = torch.empty_like(x)
    if n := x.numel():
        _forward_kernel[(triton.cdiv(n, BLOCK),)](x, y, n, VARIANT=VARIANTS[approximate], BLOCK=BLOCK, num_warps=8)
    return y


def gelu_backward(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Return grad f'(x), in x's layout."""
    x = _dense(x)
    gx = torch.empty_like(x)
    grad = grad if grad.stride() == x.stride() else torch.empty_like(x, dtype=grad.dtype).copy_(grad)
    if n := x.numel():
        grid = (triton.cdiv(n, BLOCK),)
        _backward_kernel[grid](grad, x, gx, n, VARIANT=VARIANTS[approximate], BLOCK=BLOCK, num_warps=8)
    return gx


def bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return f(x + bias)."""
    x, bias = x.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    if size := x.numel():
        grid = (triton.cdiv(size, BLOCK),)
        variant = VARIANTS[approximate]
        _bias_kernel[grid](x, bias, y, size, bias.numel(), VARIANT=variant, BLOCK=BLOCK, num_warps=8)
    return y


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return grad f'(x + bias), and its sum over rows."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    n, gx = bias.numel(), torch.empty_like(x)
    if not x.numel():
        return gx, torch.zeros_like(bias)
    rows = x.numel() // n
    sums = torch.empty(triton.cdiv(rows, ROWS), n, device=x.device, dtype=torch.float32)
    _bias_backward_kernel[(triton.cdiv(n, COLUMNS), len(sums))](
        grad, x, bias, gx, sums, rows, n, VARIANT=VARIANTS[approximate], ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return gx, sums.sum(0).to(bias.dtype)
