"""Max pooling over height and width, with its backward written by hand.

    y[oh, ow] = max over (i, j) of x[oh sh - ph + i dh, ow sw - pw + j dw],  i < kh, j < kw, inside the input
    dL/dx[h, w] = sum of dL/dy[oh, ow] over the windows (oh, ow) whose maximum is at (h, w)

The maximum's place is kept as i kw + j, an int8: 1 byte a window where PyTorch's max_pool2d_with_indices keeps 8. Of equal
elements the first is the maximum, of NaN the last, as in PyTorch. docs/ops/max_pool.md has derivation, kernels and figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops import library
from gptscale.ops.arguments import check_tensor
from gptscale.ops.windows import Pair, memory_format, pair, windows_along

IMPLEMENTATIONS = ("auto", "loop", "python", "cpp", "triton")
MAX_WINDOW = 127  # what an int8 can number from 0


def max_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """The largest element of each window of x (batch, channels, height, width) or (channels, height, width).

    Arguments as torch.nn.functional.max_pool2d; stride is kernel_size unless given. In x's dtype, channels_last if x is;
    differentiable as often as one likes, once each time by the backward kernel. implementation: auto takes C++ on a CPU
    and Triton on a GPU; loop (element by element, to learn from), python, cpp and triton insist. Raises TypeError or
    ValueError that names the argument.
    """
    return max_pool2d_with_offsets(x, kernel_size, stride, padding, dilation, ceil_mode, implementation)[0]


def max_pool2d_with_offsets(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(y, offsets): `max_pool2d`, and where in its window each maximum was: i kw + j, or -1 in a window all of padding."""
    check_tensor("x", x)
    geometry = _geometry(kernel_size, stride, padding, dilation)
    if x.dim() not in (3, 4):
        raise ValueError(f"x: shape (batch, channels, height, width) or without batch expected, not {tuple(x.shape)}")
    out_height, out_width = _out_size(x.shape, geometry, ceil_mode)
    if x.shape[-2] < 1 or x.shape[-1] < 1 or out_height < 1 or out_width < 1:
        raise ValueError(f"x: {tuple(x.shape)} is too small for windows of {geometry[0]} (dilation {geometry[3]})")
    y: Tensor
    if _written_in_python(implementation):
        y, offsets = MaxPoolFunction.apply(x, *geometry, ceil_mode, implementation)  # type: ignore[no-untyped-call]
    else:
        library.require(implementation, x.device)
        library.ready()
        y, offsets = torch.ops.gptscale.max_pool2d(x, *geometry, ceil_mode)
    return y, offsets


def max_pool2d_backward(
    grad: Tensor,
    offsets: Tensor,
    input_size: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    implementation: str = "auto",
) -> Tensor:
    """The gradient of the input of `input_size`, from that of the output and the offsets of the same shape.

    Summed in fp32 for the half precisions, in the order of the windows, whatever the number of threads; channels_last if
    the offsets are. An offset that points outside the input counts for nothing.
    """
    check_tensor("grad", grad)
    geometry = _geometry(kernel_size, stride, padding, dilation)
    input_size = tuple(input_size)
    _check_offsets(grad, offsets, input_size, geometry)
    result: Tensor
    if _written_in_python(implementation):
        function: Any = MaxPoolBackwardFunction
        result = function.apply(grad, offsets, input_size, *geometry, implementation)
    else:
        library.require(implementation, grad.device)
        library.ready()
        result = torch.ops.gptscale.max_pool2d_backward(grad, offsets, input_size, *geometry)
    return result


def _written_in_python(implementation: str) -> bool:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: one of {', '.join(IMPLEMENTATIONS)} expected, not {implementation!r}")
    return implementation in ("loop", "python")


def _geometry(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Pair, Pair, Pair, Pair]:
    kernel = pair("kernel_size", kernel_size, 1)
    if kernel[0] * kernel[1] > MAX_WINDOW:
        raise ValueError(f"kernel_size: at most {MAX_WINDOW} elements expected, as offsets are int8, not {kernel}")
    paddings, dilations = pair("padding", padding, 0), pair("dilation", dilation, 1)
    if paddings[0] > kernel[0] // 2 or paddings[1] > kernel[1] // 2:
        raise ValueError(f"padding: at most half of kernel_size {kernel} expected, not {paddings}")
    return kernel, kernel if stride is None else pair("stride", stride, 1), paddings, dilations


def _out_size(size: Sequence[int], geometry: tuple[Pair, Pair, Pair, Pair], ceil_mode: bool) -> Pair:
    kernel, stride, padding, dilation = geometry
    return (
        windows_along(size[-2], kernel[0], stride[0], padding[0], dilation[0], ceil_mode),
        windows_along(size[-1], kernel[1], stride[1], padding[1], dilation[1], ceil_mode),
    )


def _check_offsets(grad: Tensor, offsets: Any, size: tuple[int, ...], geometry: tuple[Pair, Pair, Pair, Pair]) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int8:
        what = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets: an int8 Tensor expected, not {what}")
    if offsets.device != grad.device:
        raise ValueError(f"offsets: on {offsets.device}, but grad is on {grad.device}")
    if offsets.shape != grad.shape:
        raise ValueError(f"offsets: grad's shape {tuple(grad.shape)} expected, not {tuple(offsets.shape)}")
    if len(size) not in (3, 4) or len(size) != grad.dim() or min(size[-2:]) < 1:
        raise ValueError(f"input_size: 3 or 4 sizes expected, as many as grad {tuple(grad.shape)} has, not {size}")
    fitting = (*size[:-2], *_out_size(size, geometry, False))
    if tuple(grad.shape) not in (fitting, (*size[:-2], *_out_size(size, geometry, True))):
        raise ValueError(f"grad: shape {fitting} expected, for an input of {size}, not {tuple(grad.shape)}")


# --- Element by element, as one would first write it: the teaching baseline


def loop_max_pool2d(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Every window of every channel in turn."""
    out_size = _out_size(x.shape, (kernel, stride, padding, dilation), ceil_mode)
    y = _new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
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
    to_x = _new(offsets, input_size, _wide(grad).dtype).zero_()
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
    out_size = _out_size(x.shape, (kernel, stride, padding, dilation), ceil_mode)
    below, right = (
        max(0, (n - 1) * s + (k - 1) * d + 1 - p - length)
        for n, k, s, p, d, length in zip(out_size, kernel, stride, padding, dilation, x.shape[-2:], strict=True)
    )
    padded = F.pad(x, (padding[1], right, padding[0], below), value=-math.inf)
    best = _new(x, (*x.shape[:-2], *out_size), x.dtype).fill_(-math.inf)
    offsets = _new(x, best.shape, torch.int8).copy_(
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
    return _new(offsets, input_size, grad.dtype).copy_(cropped)


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


def _new(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
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


# --- To torch.library


def _fake(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    size = (*x.shape[:-2], *_out_size(x.shape, (kernel, stride, padding, dilation), ceil_mode))
    return _new(x, size, x.dtype), _new(x, size, torch.int8)


def _fake_backward(grad: Tensor, offsets: Tensor, input_size: Sequence[int], *_: Any) -> Tensor:
    return _new(offsets, input_size, grad.dtype)


def _triton(name: str) -> Any:
    def run(*args: Any) -> Any:
        from gptscale.ops import max_pool_triton

        return getattr(max_pool_triton, name)(*args)

    return run


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.geometry, _ = inputs
    ctx.input_size = x.shape
    ctx.save_for_backward(output[1])


def _formula(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    return torch.ops.gptscale.max_pool2d_backward(grad, offsets, ctx.input_size, *ctx.geometry), *[None] * 5


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, _, *ctx.geometry = inputs
    ctx.save_for_backward(offsets)


def _backward_formula(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    return select(upstream, ctx.saved_tensors[0], *ctx.geometry), *[None] * 6


library.define(
    "max_pool2d(Tensor x, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    python=python_max_pool2d,
    triton=_triton("max_pool2d"),
    setup_context=_save,
    backward=_formula,
)
library.define(
    "max_pool2d_backward(Tensor grad, Tensor offsets, SymInt[] input_size, int[2] kernel_size, int[2] stride,"
    " int[2] padding, int[2] dilation) -> Tensor",
    fake=_fake_backward,
    python=python_max_pool2d_backward,
    triton=_triton("max_pool2d_backward"),
    setup_context=_save_backward,
    backward=_backward_formula,
)
