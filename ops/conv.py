"""Convolution, bias and ReLU as one operator, with its backward by mask.

    y = max(0, x * w + b)                            (* is the cross-correlation of torch.nn.functional.conv2d)
    m = dL/dy where y > 0, else 0                    (dL/dy where y is NaN too: as in PyTorch, all that is not <= 0 passes)
    dL/dx = m convolved with w,  dL/dw = x correlated with m,  dL/db = sum of m over batch, height and width

y itself shows where ReLU let the gradient through, so only inputs and output are kept for the backward.
docs/ops/conv_bias_relu.md has the derivation, the kernels and measured figures, and says which parts are kernels of this
package and which are a library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops import registry
from gptscale.ops.arguments import check_like, check_shape, check_tensor
from gptscale.ops.conv_python import (
    backward_formula,
    convolution_backward,
    python_conv_bias_relu,
    python_conv_bias_relu_backward,
    save_backward,
    save_forward,
)
from gptscale.ops.windows import Pair, memory_format, pair, windows_over


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
    """Return relu(conv2d(x, weight, bias)) of x (batch, channels, height, width).

    It can be differentiated twice. Under autocast it runs in autocast's precision, as conv2d does.

    weight: (out channels, channels / groups, kernel height, kernel width). bias: (out channels,). The other arguments are
    those of torch.nn.functional.conv2d. implementation: auto takes C++ on a CPU and Triton on a GPU, while python, cpp and
    triton demand that one. Raises TypeError or ValueError that names the argument.
    """
    y: Tensor
    # The checks in Python take a twentieth of a call of 0.2 ms. The C++ operator makes the same checks, but has no words for
    # them. So it comes first, and what it refuses is checked below. Left out is what it cannot see: other devices, what
    # autocast is going to change, a bool in place of an int, and tensors of a tracer.
    if (
        implementation in ("auto", "cpp")
        and type(groups) is int
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and registry.ready()
    ):
        try:
            if x.is_cpu and weight.is_cpu and bias.is_cpu:
                pairs = pair("stride", stride, 1), pair("padding", padding, 0), pair("dilation", dilation, 1)
                y = torch.ops.gptscale.conv_bias_relu(x, weight, bias, *pairs, groups)
                return y
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass
    check_tensor("x", x)
    check_like("weight", weight, "x", x)
    check_like("bias", bias, "x", x)
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    if bias.shape != weight.shape[:1]:
        check_shape("bias", bias, (weight.shape[0],), f"one for each output channel of weight {tuple(weight.shape)}")
    y = registry.chosen("conv_bias_relu", implementation, x.device)(x, weight, bias, *geometry)
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
    """Run `conv_bias_relu` without recording for autograd, for callers that call the backward themselves."""
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
    needs: tuple[bool, bool, bool] = (True, True, True),
    implementation: str = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias from that of y, or None for those that `needs` does not name."""
    check_tensor("x", x)
    check_like("weight", weight, "x", x)
    geometry = _geometry(x, weight, stride, padding, dilation, groups)
    for name, tensor in (("grad", grad), ("y", y)):
        check_like(name, tensor, "x", x)
        shape = (x.shape[0], weight.shape[0], *windows_over(x.shape, weight.shape, *geometry[:3]))
        check_shape(name, tensor, shape, f"the output's, for x {tuple(x.shape)}")
    if not isinstance(needs, (tuple, list)) or len(needs) != 3 or not all(isinstance(n, bool) for n in needs):
        raise TypeError(f"needs: three bools expected (for x, weight, bias), not {needs!r}")
    operator = registry.chosen("conv_bias_relu_backward", implementation, x.device)
    gradients = operator(grad, y, x, weight, *geometry, needs)
    to_x, to_weight, to_bias = (g if needed else None for g, needed in zip(gradients, needs, strict=True))
    return to_x, to_weight, to_bias


def _geometry(
    x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any
) -> tuple[Pair, Pair, Pair, int]:
    """Return stride, padding and dilation as pairs, and groups, after checking that they fit the two tensors."""
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
    out_height, out_width = windows_over(size, kernel, *geometry)
    if out_height < 1 or out_width < 1:
        raise ValueError(
            f"x: {tuple(size)} is too small for weight {tuple(kernel)} (padding {geometry[1]}, dilation {geometry[2]})"
        )
    return *geometry, groups


def _cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors as torch's own conv2d does under autocast, all but fp64."""
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


# --- Registration with torch.library


def _fake(x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    # On a CPU the library chooses the layout of the output.
    if x.device.type == "cpu":
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    shape = (x.shape[0], weight.shape[0], *windows_over(x.shape, weight.shape, stride, padding, dilation))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def _fake_backward(
    grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, *geometry_and_needs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *geometry, needs = geometry_and_needs
    to_x, to_weight = convolution_backward(torch.empty_like(y), x, weight, geometry, needs[:2])
    return to_x, to_weight, grad.new_empty(weight.shape[0] if needs[2] else 0)


def _formula(named: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    gradients = named("conv_bias_relu_backward")(grad, *ctx.saved_tensors, *ctx.geometry, needs)
    return *(g if needed else None for g, needed in zip(gradients, needs, strict=True)), None, None, None, None


registry.define(
    "conv_bias_relu(Tensor x, Tensor weight, Tensor bias, int[2] stride, int[2] padding, int[2] dilation, int groups)"
    " -> Tensor",
    fake=_fake,
    python={"python": python_conv_bias_relu},
    cuda="gptscale.ops.conv_triton",
    setup_context=save_forward,
    backward=_formula,
    autocast=lambda dtype, x, weight, bias, *geometry: (*_cast(dtype, x, weight, bias), *geometry),
)
registry.define(
    "conv_bias_relu_backward(Tensor grad, Tensor y, Tensor x, Tensor weight, int[2] stride, int[2] padding,"
    " int[2] dilation, int groups, bool[3] needs) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    python={"python": python_conv_bias_relu_backward},
    cuda="gptscale.ops.conv_triton",
    setup_context=save_backward,
    backward=backward_formula,
)
