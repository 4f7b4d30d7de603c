"""Max pooling over height and width, with its backward written by hand.

    y[oh, ow] = max over (i, j) of x[oh sh - ph + i dh, ow sw - pw + j dw],  i < kh, j < kw, inside the input
    dL/dx[h, w] = sum of dL/dy[oh, ow] over the windows (oh, ow) whose maximum is at (h, w)

The place of the maximum is kept as i kw + j, an int8. That is 1 byte a window, where PyTorch's max_pool2d_with_indices keeps 8.
Among equal elements the first is the maximum, among NaN the last, as in PyTorch. docs/ops/max_pool.md has the derivation, the
kernels and measured figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gptscale.ops import registry
from gptscale.ops.arguments import check_tensor
from gptscale.ops.max_pool_python import BACKWARDS, FORWARDS, new, select
from gptscale.ops.windows import Pair, pair, windows_over

# elements, because offsets are int8
MAX_WINDOW = 127
BACKWARD = "max_pool2d_backward"


def max_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Return the largest element of each window of x, (batch, channels, height, width) or (channels, height, width).

    The arguments are those of torch.nn.functional.max_pool2d, and stride is kernel_size unless given. The result has x's
    dtype, and is channels_last if x is. It can be differentiated any number of times.

    implementation: auto takes C++ on a CPU and Triton on a GPU, while loop (element by element, to learn from), windows (one
    by one), python, cpp and triton demand that one. Raises TypeError or ValueError that names the argument.
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
    """Return the result of `max_pool2d`, and the place of each maximum in its window.

    The place is i kw + j, an int8, or -1 in a window that holds nothing but padding.
    """
    check_tensor("x", x)
    geometry = _geometry(kernel_size, stride, padding, dilation)
    if x.dim() not in (3, 4):
        raise ValueError(f"x: shape (batch, channels, height, width) or without batch expected, not {tuple(x.shape)}")
    out_height, out_width = windows_over(x.shape, *geometry, ceil_mode)
    if x.shape[-2] < 1 or x.shape[-1] < 1 or out_height < 1 or out_width < 1:
        raise ValueError(f"x: {tuple(x.shape)} is too small for windows of {geometry[0]} (dilation {geometry[3]})")
    y: Tensor
    y, offsets = registry.chosen("max_pool2d", implementation, x.device)(x, *geometry, ceil_mode)
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
    """Return the gradient of the input of `input_size`, from the output's gradient and the offsets of the same shape.

    The half precisions are summed in fp32. The order of each sum is that of the windows, for any number of threads. The
    result is channels_last if the offsets are. An offset that points outside the input is ignored.
    """
    check_tensor("grad", grad)
    geometry = _geometry(kernel_size, stride, padding, dilation)
    input_size = tuple(input_size)
    _check_offsets(grad, offsets, input_size, geometry)
    operator = registry.chosen(BACKWARD, implementation, grad.device)
    result: Tensor = operator(grad, offsets, input_size, *geometry)
    return result


def _geometry(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Pair, Pair, Pair, Pair]:
    kernel = pair("kernel_size", kernel_size, 1)
    if kernel[0] * kernel[1] > MAX_WINDOW:
        raise ValueError(f"kernel_size: at most {MAX_WINDOW} elements expected, as offsets are int8, not {kernel}")
    paddings, dilations = pair("padding", padding, 0), pair("dilation", dilation, 1)
    if paddings[0] > kernel[0] // 2 or paddings[1] > kernel[1] // 2:
        raise ValueError(f"padding: at most half of kernel_size {kernel} expected, not {paddings}")
    return kernel, kernel if stride is None else pair("stride", stride, 1), paddings, dilations


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
    fitting = (*size[:-2], *windows_over(size, *geometry))
    if tuple(grad.shape) not in (fitting, (*size[:-2], *windows_over(size, *geometry, True))):
        raise ValueError(f"grad: shape {fitting} expected, for an input of {size}, not {tuple(grad.shape)}")


# --- Registration with torch.library


def _fake(
    x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    size = (*x.shape[:-2], *windows_over(x.shape, kernel, stride, padding, dilation, ceil_mode))
    return new(x, size, x.dtype), new(x, size, torch.int8)


def _fake_backward(grad: Tensor, offsets: Tensor, input_size: Sequence[int], *_: Any) -> Tensor:
    return new(offsets, input_size, grad.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *ctx.geometry, _ = inputs
    ctx.input_size = x.shape
    ctx.save_for_backward(output[1])


def _formula(named: Any, ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    (offsets,) = ctx.saved_tensors
    to_x = named(BACKWARD)(grad, offsets, ctx.input_size, *ctx.geometry)
    return to_x, *[None] * 5


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, _, *ctx.geometry = inputs
    ctx.save_for_backward(offsets)


def _backward_formula(named: Any, ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    return select(upstream, ctx.saved_tensors[0], *ctx.geometry), None, None, None, None, None, None


registry.define(
    "max_pool2d(Tensor x, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode)"
    " -> (Tensor, Tensor)",
    fake=_fake,
    python=FORWARDS,
    cuda="gptscale.ops.max_pool_triton",
    setup_context=_save,
    backward=_formula,
)
registry.define(
    f"{BACKWARD}(Tensor grad, Tensor offsets, SymInt[] input_size, int[2] kernel_size, int[2] stride,"
    " int[2] padding, int[2] dilation) -> Tensor",
    fake=_fake_backward,
    python=BACKWARDS,
    cuda="gptscale.ops.max_pool_triton",
    setup_context=_save_backward,
    backward=_backward_formula,
)
