"""Layers: parameters, the modules that hold them, and the search that finds every parameter of any model."""

from __future__ import annotations

import math
from typing import Literal

import torch

from gptscale.ops.minigrad.convolution import conv2d
from gptscale.ops.minigrad.kernels import ConvBiasReLU, MaxPooling
from gptscale.ops.minigrad.tensor import Array, Tensor

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
