"""Convolution as a matrix product (im2col), and the package's compiled operators as operations of the graph.

An operation may compute its value and its gradient by any means. The graph only asks for `compute` and `gradient`. The
gradients of ConvBiasReLU and MaxPooling come from kernels as plain arrays, without a record of how they were computed, so they
cannot be differentiated a second time.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from gptscale.lenet.minigrad.tensor import Array, Op, Tensor
from gptscale.ops.conv import conv_bias_relu_backward, conv_bias_relu_forward
from gptscale.ops.max_pool import max_pool2d_backward, max_pool2d_with_offsets


class Unfold(Op):
    """im2col, which copies each window of an image into a column.

    (batch, channels, height, width) becomes (batch, channels * size^2, positions). A pixel is copied into each window that
    covers it, so its gradient is the sum over those copies, which is Fold. windows: the arguments of torch's own two functions.
    """

    def __init__(self, **windows: int) -> None:
        self.windows = windows

    def compute(self, x: Array) -> Array:
        return F.unfold(x, **self.windows)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (Fold(node.inputs[0].shape[2:], **self.windows)(out_grad),)


class Fold(Unfold):
    """col2im, which adds the windows up at their positions on an image of `size`.

    It is linear and the transpose of Unfold, so each of the two is the gradient of the other.
    """

    def __init__(self, size: tuple[int, ...], **windows: int) -> None:
        super().__init__(**windows)
        self.size = size

    def compute(self, x: Array) -> Array:
        return F.fold(x, self.size, **self.windows)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        return (Unfold(**self.windows)(out_grad),)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Return the product of each window of `x` with each filter of `weight`, plus `bias`.

    x: (batch, in_channels, height, width). weight: (out_channels, in_channels, size, size). bias: (out_channels,).
    """
    batch, _, height, _ = x.shape
    out_channels, in_channels, size, _ = weight.shape
    filters = weight.reshape(out_channels, in_channels * size**2)
    y = filters @ Unfold(kernel_size=size, stride=stride, padding=padding)(x) + bias.reshape(out_channels, 1)
    return y.reshape(batch, out_channels, (height + 2 * padding - size) // stride + 1, -1)


class ConvBiasReLU(Op):
    """`relu(conv2d(x, weight) + bias)`, with the shapes of `conv2d`.

    The output shows where ReLU lets the gradient through, so no mask is kept.
    """

    def __init__(self, *, stride: int = 1, padding: int = 0) -> None:
        self.stride, self.padding = stride, padding

    def compute(self, x: Array, weight: Array, bias: Array) -> Array:
        return conv_bias_relu_forward(x, weight, bias, stride=self.stride, padding=self.padding)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        self.refuse_to_be_recorded()
        x, weight, bias = node.inputs
        how: dict[str, Any] = {"stride": self.stride, "padding": self.padding}
        how["needs"] = (x.needs_grad, weight.needs_grad, bias.needs_grad)
        arrays = conv_bias_relu_backward(out_grad.array, node.array, x.array, weight.array, **how)
        return tuple(None if array is None else Tensor(array) for array in arrays)


class MaxPooling(Op):
    """The largest element of each window of (batch, channels, height, width), which alone gets the window's gradient.

    backward: the implementation of the gradient, one of those of gptscale.ops.max_pool. `loop` is the simplest one.
    """

    def __init__(self, size: int, *, stride: int | None = None, padding: int = 0, backward: str = "auto") -> None:
        self.size, self.stride, self.padding, self.backward = size, stride, padding, backward

    def compute(self, x: Array) -> Array:
        y, self.offsets = max_pool2d_with_offsets(x, self.size, stride=self.stride, padding=self.padding)
        return y

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        self.refuse_to_be_recorded()
        how: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "implementation": self.backward}
        return (Tensor(max_pool2d_backward(out_grad.array, self.offsets, node.inputs[0].shape, self.size, **how)),)
