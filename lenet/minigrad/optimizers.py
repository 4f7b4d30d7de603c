"""Optimizers, which change each parameter by its gradient, and know nothing of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gptscale.lenet.minigrad.layers import Parameter
from gptscale.lenet.minigrad.tensor import Array


class Optimizer:
    """The base class, which goes through the parameters. `lr` may be changed between steps."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def step(self) -> None:
        """Change every parameter that has a gradient."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.update(index, parameter.array, parameter.grad.array)

    def update(self, index: int, weights: Array, gradient: Array) -> None:
        """Change the weights of parameter number `index`, in place."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop the gradients, which would otherwise add up over steps."""
        for parameter in self.parameters:
            parameter.grad = None


class SGD(Optimizer):
    """Gradient descent: `w -= lr v`, where `v = momentum v + g` (so `v = g` without momentum)."""

    def __init__(self, parameters: Sequence[Parameter], lr: float, *, momentum: float = 0.0) -> None:
        super().__init__(parameters, lr)
        self.momentum = momentum
        self.velocity: dict[int, Array] = {}

    def update(self, index: int, weights: Array, gradient: Array) -> None:
        if self.momentum:
            before = self.velocity.get(index)
            gradient = gradient if before is None else self.momentum * before + gradient
            self.velocity[index] = gradient
        weights -= self.lr * gradient


class Adam(Optimizer):
    """Adam: `w -= lr m / (sqrt(v) + eps)` (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1).

    m and v are running means of g and g^2, both corrected for their start at zero.
    """

    def __init__(
        self, parameters: Sequence[Parameter], lr: float, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
    ) -> None:
        super().__init__(parameters, lr)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.moments: dict[int, tuple[int, Array, Array]] = {}

    def update(self, index: int, weights: Array, gradient: Array) -> None:
        zeros = gradient.new_zeros(gradient.shape)
        steps, mean, square = self.moments.get(index, (0, zeros, zeros))
        steps += 1
        mean = self.beta1 * mean + (1 - self.beta1) * gradient
        square = self.beta2 * square + (1 - self.beta2) * gradient**2
        self.moments[index] = steps, mean, square
        mean_hat = mean / (1 - self.beta1**steps)
        deviation = square.sqrt() / math.sqrt(1 - self.beta2**steps)
        weights -= self.lr * mean_hat / (deviation + self.eps)
