"""The package's compiled operators inside the graph: convolution with bias and ReLU in one, and max pooling.

An operation is free to compute its value and gradient by any means; the graph only asks for `compute` and `gradient`.
These gradients come out of kernels as bare arrays, with no record of how: they cannot be differentiated a second time.
"""

from __future__ import annotations

from gptscale.ops.conv import conv_bias_relu_backward, conv_bias_relu_forward
from gptscale.ops.max_pool import max_pool2d_backward, max_pool2d_with_offsets
from gptscale.ops.minigrad.tensor import Array, Op, Tensor, is_recording


class ConvBiasReLU(Op):
    """`relu(conv2d(x, weight) + bias)`, shapes as in convolution.conv2d.

    The output tells where ReLU let the gradient through, so no mask is kept beside it.
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
    """The largest element of each window of (batch, channels, height, width): only that element gets the gradient.

    backward: which implementation brings it there, one of those of gptscale.ops.max_pool; `loop` is the naive one.
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
    """A second derivative would silently lack this operation's part."""
    if is_recording():
        name = type(op).__name__
        raise NotImplementedError(f"{name} has no second derivative: its gradient is a kernel's, use conv2d and relu")
