"""Convolution, bias and ReLU as one operator, with its backward by mask.

    y = max(0, x * w + b)                            (* the cross-correlation of torch.nn.functional.conv2d)
    m = dL/dy where y > 0, else 0                    (where y is NaN too, as in PyTorch: what is not <= 0 passes)
    dL/dx = m convolved with w,  dL/dw = x correlated with m,  dL/db = sum of m over batch, height and width

y itself tells where ReLU let through, so nothing but inputs and output is kept for the backward. docs/ops/conv_bias_relu.md
has derivation, kernels and figures, and says which part is ours and which a library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops import library
from gptscale.ops.arguments import check_like, check_shape, check_tensor
from gptscale.ops.windows import Pair, memory_format, pair, windows_along

IMPLEMENTATIONS = ("auto", "python", "cpp", "triton")
Needs = tuple[bool, bool, bool]


def conv_bias_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    implementation: str = "auto",
) -> Tensor:
    """relu(conv2d(x, weight, bias)) of x (batch, channels, height, width); differentiable twice.

    weight (out channels, channels / groups, kernel height, kernel width), bias (out channels); the other arguments as
    torch.nn.functional.conv2d. Under autocast in its precision, as conv2d. implementation: auto takes C++ on a CPU and
    Triton on a GPU; python, cpp and triton insist. Raises TypeError or ValueError that names the argument.
    """
    geometry = _check(x, weight, bias, stride, padding, dilation, groups)
    y: Tensor
    if _written_in_python(implementation):
        x, weight, bias = _autocast(x, weight, bias)
        y = ConvBiasReluFunction.apply(x, weight, bias, *geometry)  # type: ignore[no-untyped-call]
    else:
        library.require(implementation, x.device)
        library.ready()
        y = torch.ops.gptscale.conv_bias_relu(x, weight, bias, *geometry)
    return y


def conv_bias_relu_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    implementation: str = "auto",
) -> Tensor:
    """`conv_bias_relu` that records nothing for autograd: for those who call the backward themselves."""
    with torch.no_grad():
        return conv_bias_relu(x, weight, bias, stride, padding, dilation, groups, implementation)


def conv_bias_relu_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    needs: Needs = (True, True, True),
    implementation: str = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, from that of y; None where `needs` says that one is not wanted."""
    check_tensor("x", x)
    check_like("weight", weight, "x", x)
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    for name, tensor in (("grad", grad), ("y", y)):
        check_like(name, tensor, "x", x)
        shape = (x.shape[0], weight.shape[0], *_out_size(x.shape, weight.shape, *geometry[:3]))
        check_shape(name, tensor, shape, f"the output's, for x {tuple(x.shape)}")
    if not isinstance(needs, (tuple, list)) or len(needs) != 3 or not all(isinstance(n, bool) for n in needs):
        raise TypeError(f"needs: three bools expected (for x, weight, bias), not {needs!r}")
    if _written_in_python(implementation):
        function: Any = ConvBiasReluBackwardFunction
        found = function.apply(grad, y, x, weight, *geometry, tuple(needs))
    else:
        library.require(implementation, x.device)
        library.ready()
        found = torch.ops.gptscale.conv_bias_relu_backward(grad, y, x, weight, *geometry, needs)
    to_x, to_weight, to_bias = (one if needed else None for one, needed in zip(found, needs, strict=True))
    return to_x, to_weight, to_bias


def _written_in_python(implementation: str) -> bool:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: one of {', '.join(IMPLEMENTATIONS)} expected, not {implementation!r}")
    return implementation == "python"


def _check(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[Pair, Pair, Pair, int]:
    check_tensor("x", x)
    check_like("weight", weight, "x", x)
    check_like("bias", bias, "x", x)
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    if bias.shape != weight.shape[:1]:
        check_shape("bias", bias, (weight.shape[0],), f"one for each output channel of weight {tuple(weight.shape)}")
    return geometry


def _geometry(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[Pair, Pair, Pair, int]:
    """Stride, padding, dilation as pairs, and groups, once they and the two tensors fit each other."""
    geometry = pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1)
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"groups: an int expected, not {groups!r}")
    size, kernel = x.shape, weight.shape
    if len(size) != 4:
        raise ValueError(f"x: shape (batch, channels, height, width) expected, not {tuple(size)}")
    if len(kernel) != 4 or min(kernel) < 1:
        raise ValueError(
            "weight: shape (out channels, channels / groups, kernel height, kernel width), none of them 0, expected, "
            f"not {tuple(kernel)}"
        )
    if groups < 1 or kernel[0] % groups:
        raise ValueError(f"groups: a divisor of weight's {kernel[0]} output channels expected, not {groups}")
    if size[1] != kernel[1] * groups:
        raise ValueError(
            f"weight: shape {tuple(kernel)} with groups={groups} takes {kernel[1] * groups} channels, but x {tuple(size)} "
            f"has {size[1]}"
        )
    out_height, out_width = _out_size(size, kernel, *geometry)
    if out_height < 1 or out_width < 1:
        raise ValueError(
            f"x: {tuple(size)} is too small for weight {tuple(kernel)} (padding {geometry[1]}, dilation {geometry[2]})"
        )
    return *geometry, groups


def _out_size(size: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Height and width of the output, from the last two sizes of x and weight."""
    return (
        windows_along(size[-2], kernel[-2], stride[0], padding[0], dilation[0]),
        windows_along(size[-1], kernel[-1], stride[1], padding[1], dilation[1]),
    )


# --- By torch's own operations


def python_conv_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """The definition."""
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups).relu_()


def python_conv_bias_relu_backward(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; an empty tensor in place of one that is not needed."""
    masked = masked_by(y, grad)
    to_x, to_weight = convolution_backward(masked, x, weight, (stride, padding, dilation, groups), needs[:2])
    to_bias = masked.sum((0, 2, 3)) if needs[2] else None
    none = grad.new_empty(0)
    return tuple(none if one is None else one for one in (to_x, to_weight, to_bias))  # type: ignore[return-value]


def masked_by(y: Tensor, grad: Tensor) -> Tensor:
    """`grad` where ReLU let y through."""
    return torch.where(y <= 0, 0.0, grad)


def convolution_backward(
    masked: Tensor, x: Tensor, weight: Tensor, geometry: Any, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight, from the masked one: the library's, of the plain convolution."""
    stride, padding, dilation, groups = geometry
    if not any(needs):
        return None, None
    to_x, to_weight, _ = torch.ops.aten.convolution_backward(
        masked, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (*needs, False)
    )
    return to_x, to_weight


def double_backward(
    upstream: Sequence[Tensor | None], grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, geometry: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the derivative of the backward gives grad, x and weight, from those of the gradients it returned.

    The backward is linear in m and in x or weight: each of its parts is a convolution, and so is what comes back of it.
    In torch's operations throughout, so differentiable further.
    """
    of_x, of_weight, of_bias = upstream
    flow, to_x, to_weight = torch.zeros_like(grad), None, None
    masked = masked_by(y, grad)
    if of_x is not None:
        flow = flow + F.conv2d(of_x, weight, None, *geometry)
        to_weight = convolution_backward(masked, of_x, weight, geometry, (False, True))[1]
    if of_weight is not None:
        flow = flow + F.conv2d(x, of_weight, None, *geometry)
        to_x = convolution_backward(masked, x, of_weight, geometry, (True, False))[0]
    if of_bias is not None:
        flow = flow + of_bias[:, None, None]
    return masked_by(y, flow), to_x, to_weight


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As torch's own conv2d takes them: under autocast in its precision, fp64 excepted."""
    device = tensors[0].device.type
    return _cast(torch.get_autocast_dtype(device), *tensors) if torch.is_autocast_enabled(device) else tensors


def _cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


class ConvBiasReluFunction(torch.autograd.Function):
    """The operator with its derivative written by hand; that derivative is a Function too, and so has one itself."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return python_conv_bias_relu(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, *ctx.geometry = inputs
        ctx.save_for_backward(output, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:3])
        function: Any = ConvBiasReluBackwardFunction
        found = function.apply(grad, *ctx.saved_tensors, *ctx.geometry, needs)
        return *(one if needed else None for one, needed in zip(found, needs, strict=True)), *[None] * 4


class ConvBiasReluBackwardFunction(torch.autograd.Function):
    """The gradients of x, weight and bias."""

    @staticmethod
    def forward(
        grad: Tensor,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        needs: Needs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return python_conv_bias_relu_backward(grad, y, x, weight, stride, padding, dilation, groups, needs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        _save_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward_formula(ctx, *upstream)


# --- To torch.library


def _fake(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    if x.device.type == "cpu":  # the layout is the library's choice
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    shape = (x.shape[0], weight.shape[0], *_out_size(x.shape, weight.shape, stride, padding, dilation))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _fake_backward(
    grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, *geometry_and_needs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *geometry, needs = geometry_and_needs
    to_x, to_weight = convolution_backward(torch.empty_like(y), x, weight, geometry, needs[:2])
    none = grad.new_empty(0)
    to_bias = grad.new_empty(weight.shape[0]) if needs[2] else none
    return none if to_x is None else to_x, none if to_weight is None else to_weight, to_bias


def _triton(name: str) -> Any:
    def run(*args: Any) -> Any:
        from gptscale.ops import conv_triton

        return getattr(conv_triton, name)(*args)

    return run


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *ctx.geometry = inputs
    ctx.save_for_backward(output, x, weight)


def _formula(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    found = torch.ops.gptscale.conv_bias_relu_backward(grad, *ctx.saved_tensors, *ctx.geometry, needs)
    return *(one if needed else None for one, needed in zip(found, needs, strict=True)), *[None] * 4


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, stride, padding, dilation, groups, ctx.needs = inputs
    ctx.geometry = stride, padding, dilation, groups
    ctx.save_for_backward(*tensors)


def _backward_formula(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    wanted = [one if needed else None for one, needed in zip(upstream, ctx.needs, strict=True)]
    grad, y, x, weight = ctx.saved_tensors
    to_grad, to_x, to_weight = double_backward(wanted, grad, y, x, weight, ctx.geometry)
    return to_grad, None, to_x, to_weight, *[None] * 5


library.define(
    "conv_bias_relu(Tensor x, Tensor weight, Tensor bias, int[2] stride, int[2] padding, int[2] dilation, int groups)"
    " -> Tensor",
    fake=_fake,
    python=python_conv_bias_relu,
    triton=_triton("conv_bias_relu"),
    setup_context=_save,
    backward=_formula,
    autocast=lambda dtype, x, weight, bias, *geometry: (*_cast(dtype, x, weight, bias), *geometry),
)
library.define(
    "conv_bias_relu_backward(Tensor grad, Tensor y, Tensor x, Tensor weight, int[2] stride, int[2] padding,"
    " int[2] dilation, int groups, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    python=python_conv_bias_relu_backward,
    triton=_triton("conv_bias_relu_backward"),
    setup_context=_save_backward,
    backward=_backward_formula,
)
