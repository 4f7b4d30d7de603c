"""Convolution + bias + ReLU and its derivatives by torch's own operations.

They define the operator, and run where there is no kernel. ops/conv.py has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops.windows import Pair, memory_format


def python_conv_bias_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:
    """Return relu(conv2d(x, weight, bias)), the definition of the operator."""
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups).relu_()
    # On a CPU the library chooses the layout of the output.
    return y if y.is_cpu else y.contiguous(memory_format=memory_format(x))


def python_conv_bias_relu_backward(
    grad: Tensor, y: Tensor, x: Tensor, weight: Tensor, *geometry_and_needs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, with an empty tensor for each that is not needed.

    geometry_and_needs: stride, padding, dilation, groups, and three bools.
    """
    *geometry, needs = geometry_and_needs
    masked = masked_by(y, grad)
    to_x, to_weight = convolution_backward(masked, x, weight, geometry, needs[:2])
    return to_x, to_weight, masked.sum((0, 2, 3)) if needs[2] else grad.new_empty(0)


def masked_by(y: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` where ReLU let y through, and 0 elsewhere."""
    return torch.where(y <= 0, 0.0, grad)


def convolution_backward(
    masked: Tensor, x: Tensor, weight: Tensor, geometry: Any, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight from the masked gradient, by the library's plain convolution.

    One that is not needed is an empty tensor.
    """
    stride, padding, dilation, groups = geometry
    none = masked.new_empty(0)
    if not any(needs):
        return none, none
    to_x, to_weight, _ = torch.ops.aten.convolution_backward(
        masked, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (*needs, False)
    )
    return none if to_x is None else to_x, none if to_weight is None else to_weight


def save_forward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the backward needs of the operator's arguments and of its result (a `setup_context` of torch.library)."""
    x, weight, _, *ctx.geometry = inputs
    ctx.save_for_backward(output, x, weight)


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the arguments of the backward for its derivative (a `setup_context` of torch.library)."""
    grad, y, x, weight, *ctx.geometry, ctx.needs = inputs
    ctx.save_for_backward(grad, y, x, weight)


def backward_formula(named: Any, ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
    """Differentiate the backward, for torch.library: return the gradients of its arguments grad, y, x, weight and the rest.

    upstream: the gradients of the three gradients that the backward returned.

    The backward is linear in m and in x or weight. Each of its parts is a convolution, and so is its derivative. Only
    torch's operations are used, so that the result can be differentiated further.
    """
    of_x, of_weight, of_bias = (g if needed else None for g, needed in zip(upstream, ctx.needs, strict=True))
    (grad, y, x, weight), geometry = ctx.saved_tensors, ctx.geometry
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
    return masked_by(y, flow), None, to_x, to_weight, None, None, None, None, None
