"""Layers and their parameters, the loss of a classifier, and three models for images of 28 x 28 pixels and ten classes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal

import torch

from gptscale.lenet.minigrad.convolution import ConvBiasReLU, MaxPooling, conv2d
from gptscale.lenet.minigrad.tensor import Array, Op, Tensor

Convolution = Literal["kernel", "im2col"]
Layer = Callable[[Tensor], Tensor]


class Parameter(Tensor):
    """A tensor that training changes."""

    __slots__ = ()

    def __init__(self, array: Array) -> None:
        super().__init__(array, needs_grad=True)


class Module:
    """Something with parameters that maps a tensor to a tensor."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def parameters(self) -> list[Parameter]:
        """Return the parameters of this module: in its attributes, and in modules, lists and dictionaries there, at any depth.

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
            elif isinstance(item, (dict, list, tuple)):
                for value in item.values() if isinstance(item, dict) else item:
                    visit(value)

        visit(self)
        return parameters

    def to(self, device: torch.device) -> None:
        for parameter in self.parameters():
            parameter.array = parameter.array.to(device)


def initial(shape: tuple[int, ...], fan_in: int, random: torch.Generator) -> Parameter:
    """Return normal weights of variance 2 / fan_in, which keep a signal's variance through ReLU layers (He et al. 2015)."""
    return Parameter(torch.randn(shape, generator=random) * math.sqrt(2.0 / fan_in))


class Linear(Module):
    """`x @ weight + bias`, from (batch, inputs) to (batch, outputs)."""

    def __init__(self, inputs: int, outputs: int, random: torch.Generator) -> None:
        self.weight = initial((inputs, outputs), inputs, random)
        self.bias = Parameter(torch.zeros(outputs))

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class ConvReLU(Module):
    """Convolution, bias and ReLU, by the package's kernel (`kernel`) or by the matrix product of this folder (`im2col`)."""

    def __init__(
        self,
        in_channels: int, out_channels: int, size: int, random: torch.Generator, *, stride: int = 1, padding: int = 0,
        convolution: Convolution = "kernel",
    ) -> None:  # fmt: skip
        self.weight = initial((out_channels, in_channels, size, size), in_channels * size**2, random)
        self.bias = Parameter(torch.zeros(out_channels))
        self.stride, self.padding, self.convolution = stride, padding, convolution

    def __call__(self, x: Tensor) -> Tensor:
        if self.convolution == "im2col":
            return conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding).relu()
        return ConvBiasReLU(stride=self.stride, padding=self.padding)(x, self.weight, self.bias)


def flatten(x: Tensor) -> Tensor:
    """Reshape from (batch, ...) to (batch, product of the other sizes)."""
    return x.reshape(x.shape[0], -1)


class Sequential(Module):
    """Layers one after another: modules, and functions that have no parameters."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
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


def build(name: str, *, seed: int = 0, convolution: Convolution = "kernel", pool_backward: str = "auto") -> Module:
    """Build a model for images of 28 x 28 pixels, with weights that depend on the seed alone.

    pure_linear: two linear layers, 79,510 parameters. simple_conv: one filter of 5 x 5 before them, 79,536 parameters. LeNet:
    LeNet-5 (LeCun et al. 1998) with max pooling and ReLU, as is usual today, 61,706 parameters.
    """
    random = torch.Generator().manual_seed(seed)

    def conv(inputs: int, outputs: int, padding: int = 0) -> Module:
        return ConvReLU(inputs, outputs, 5, random, padding=padding, convolution=convolution)

    def pool(x: Tensor) -> Tensor:
        return MaxPooling(2, backward=pool_backward)(x)

    def head(*sizes: int) -> list[Layer]:
        layers: list[Layer] = [flatten]
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [Linear(inputs, outputs, random), Tensor.relu]
        return layers[:-1]

    if name == "pure_linear":
        return Sequential(*head(28 * 28, 100, 10))
    if name == "simple_conv":
        return Sequential(conv(1, 1, padding=2), *head(28 * 28, 100, 10))
    # The sides are 28, 14, 10 and 5 pixels.
    return Sequential(conv(1, 6, padding=2), pool, conv(6, 16), pool, *head(16 * 5 * 5, 120, 84, 10))
