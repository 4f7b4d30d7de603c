"""The package's compiled operators as operations of the graph: convolution + bias + ReLU, and max pooling.

An operation may compute its value and its gradient by any means. The graph only asks for `compute` and `gradient`. The
gradients here come from kernels as plain arrays, without a record of how they were computed, so they cannot be
differentiated a second time.
"""

from __future__ import annotations

from gptscale.ops.conv import conv_bias_relu_backward, conv_bias_relu_forward
from gptscale.ops.max_pool import max_pool2d_backward, max_pool2d_with_offsets
from gptscale.ops.minigrad.tensor import Array, Op, Tensor, is_recording


class ConvBiasReLU(Op):
    """`relu(conv2d(x, weight) + bias)`, with the shapes of convolution.conv2d.

    The output shows where ReLU lets the gradient through, so no mask is kept.
    """

    def __init__(self, *, stride: int = 1, padding: int = 0) -> None:
        self.stride, self.padding = stride, padding

    def compute(self, x: Array, weight: Array, bias: Array) -> Array:
        return conv_bias_relu_forward(x, weight, bias, stride=self.stride, padding=self.padding)

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_to_be_recorded(self)
        x, weight, bias = node.inputs
        arrays = conv_bias_relu_backward(
            out_grad.array,
            node.array,
            x.array,
            weight.array,
            stride=self.stride,
            padding=self.padding,
            needs=(x.needs_grad, weight.needs_grad, bias.needs_grad),
        )
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
        _refuse_to_be_recorded(self)
        array = max_pool2d_backward(
            out_grad.array,
            self.offsets,
            node.inputs[0].shape,
            self.size,
            stride=self.stride,
            padding=self.padding,
            implementation=self.backward,
        )
        return (Tensor(array),)


def _refuse_to_be_recorded(op: Op) -> None:
    """Raise NotImplementedError while recording, because a second derivative would silently lack this operation."""
    if is_recording():
        name = type(op).__name__
        raise NotImplementedError(f"{name} has no second derivative: its gradient is a kernel's, use conv2d and relu")
