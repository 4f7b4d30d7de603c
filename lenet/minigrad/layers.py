"""Layers and their parameters, the loss of a classifier, and three models for images of 28 x 28 pixels and ten classes."""

from __future__ import annotations

import math
from typing import Literal

import torch

from gptscale.lenet.minigrad.convolution import ConvBiasReLU, MaxPooling, conv2d
from gptscale.lenet.minigrad.tensor import Array, Op, Tensor

Convolution = Literal["kernel", "im2col"]


class Parameter(Tensor):
    """A tensor that training changes."""

    __slots__ = ()

    def __init__(self, array: Array) -> None:
        super().__init__(array, needs_grad=True)


class Module:
    """Something with parameters that maps a tensor to a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def parameters(self) -> list[Parameter]:
        """Return every parameter of this module and the modules in it, once each, in the order of the attributes."""
        return find_parameters(self)

    def to(self, device: torch.device) -> None:
        """Move all parameters to a device."""
        for parameter in self.parameters():
            parameter.array = parameter.array.to(device)


def find_parameters(root: object) -> list[Parameter]:
    """Return the parameters in an object, in its attributes, and in lists, tuples and dictionaries, at any depth.

    A parameter that can be reached in two ways (a shared weight) is listed once, because an optimizer must not apply its
    gradient twice.
    """
    parameters: list[Parameter] = []
    visited: set[int] = set()

    def visit(item: object) -> None:
        if id(item) in visited:
            return
        visited.add(id(item))
        if isinstance(item, Parameter):
            parameters.append(item)
        elif isinstance(item, Module):
            visit(vars(item))
        elif isinstance(item, dict):
            for value in item.values():
                visit(value)
        elif isinstance(item, (list, tuple)):
            for value in item:
                visit(value)

    visit(root)
    return parameters


def initial(shape: tuple[int, ...], fan_in: int, random: torch.Generator) -> Parameter:
    """Return normal weights of variance 2 / fan_in, which keep a signal's variance through ReLU layers (He et al. 2015)."""
    return Parameter(torch.randn(shape, generator=random) * math.sqrt(2.0 / fan_in))


class Linear(Module):
    """`x @ weight + bias`, from (batch, inputs) to (batch, outputs)."""

    def __init__(self, inputs: int, outputs: int, random: torch.Generator) -> None:
        self.weight = initial((inputs, outputs), inputs, random)
        self.bias = Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ConvReLU(Module):
    """Convolution, bias and ReLU, by the package's kernel (`kernel`) or by the matrix product of this folder (`im2col`)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        random: torch.Generator,
        *,
        stride: int = 1,
        padding: int = 0,
        convolution: Convolution = "kernel",
    ) -> None:
        self.weight = initial((out_channels, in_channels, size, size), in_channels * size**2, random)
        self.bias = Parameter(torch.zeros(out_channels))
        self.stride, self.padding, self.convolution = stride, padding, convolution

    def forward(self, x: Tensor) -> Tensor:
        if self.convolution == "im2col":
            return conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding).relu()
        return ConvBiasReLU(stride=self.stride, padding=self.padding)(x, self.weight, self.bias)


class MaxPool(Module):
    """The largest of each `size` x `size` pixels, with `backward` as in MaxPooling."""

    def __init__(self, size: int, *, backward: str = "auto") -> None:
        self.size, self.backward = size, backward

    def forward(self, x: Tensor) -> Tensor:
        return MaxPooling(self.size, backward=self.backward)(x)


class ReLULayer(Module):
    """ReLU as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Flatten(Module):
    """A reshape from (batch, ...) to (batch, product of the other sizes)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


class Sequential(Module):
    """Layers one after another."""

    def __init__(self, *layers: Module) -> None:
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LogSumExp(Op):
    """`log(sum(exp(a)))` over the last axis, which stays with length 1.

    Its derivative is the softmax of `a`. The largest element is subtracted first, because exp overflows float32 from 89 on.
    """

    def compute(self, a: Array) -> Array:
        largest = a.amax(-1, keepdim=True)
        return (a - largest).exp().sum(-1, keepdim=True).log() + largest

    def gradient(self, out_grad: Tensor, node: Tensor) -> tuple[Tensor]:
        (a,) = node.inputs
        return (out_grad * (a - node).exp(),)


def softmax_cross_entropy(logits: Tensor, labels: Array) -> Tensor:
    """Return the mean over the batch of `-log softmax(logits)[label]`, in nats.

    logits: (batch, classes). labels: (batch,), whole numbers from 0.
    """
    classes = torch.arange(logits.shape[-1], device=labels.device)
    one_hot = Tensor((labels[:, None] == classes).to(logits.array.dtype))
    of_sample = LogSumExp()(logits) - (logits * one_hot).sum(-1, keepdim=True)
    return of_sample.mean()


def pure_linear(random: torch.Generator) -> Module:
    """Build two linear layers with 100 hidden units: 79,510 parameters."""
    return Sequential(Flatten(), Linear(28 * 28, 100, random), ReLULayer(), Linear(100, 10, random))


def simple_conv(random: torch.Generator, *, convolution: Convolution = "kernel") -> Module:
    """Build one convolution, with a single filter of 5 x 5, and two linear layers: 79,536 parameters."""
    return Sequential(
        # 28 x 28
        ConvReLU(1, 1, 5, random, padding=2, convolution=convolution),
        Flatten(),
        Linear(28 * 28, 100, random),
        ReLULayer(),
        Linear(100, 10, random),
    )


def lenet(random: torch.Generator, *, convolution: Convolution = "kernel", pool_backward: str = "auto") -> Module:
    """Build LeNet-5 (LeCun et al. 1998) with max pooling and ReLU, as is usual today: 61,706 parameters."""
    return Sequential(
        # 28 x 28
        ConvReLU(1, 6, 5, random, padding=2, convolution=convolution),
        # 14 x 14
        MaxPool(2, backward=pool_backward),
        # 10 x 10
        ConvReLU(6, 16, 5, random, convolution=convolution),
        # 5 x 5
        MaxPool(2, backward=pool_backward),
        Flatten(),
        Linear(16 * 5 * 5, 120, random),
        ReLULayer(),
        Linear(120, 84, random),
        ReLULayer(),
        Linear(84, 10, random),
    )


def build(name: str, *, seed: int = 0, convolution: Convolution = "kernel", pool_backward: str = "auto") -> Module:
    """Build the model of that name, with weights that depend on the seed alone."""
    random = torch.Generator().manual_seed(seed)
    if name == "pure_linear":
        return pure_linear(random)
    if name == "simple_conv":
        return simple_conv(random, convolution=convolution)
    return lenet(random, convolution=convolution, pool_backward=pool_backward)
