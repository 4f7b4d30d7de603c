"""Timing of one training step by operation: the naive pooling backward against a kernel."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gptscale.lenet.minigrad.training import clock
from gptscale.ops.minigrad.backward import backward
from gptscale.ops.minigrad.kernels import MaxPooling
from gptscale.ops.minigrad.layers import Module
from gptscale.ops.minigrad.loss import softmax_cross_entropy
from gptscale.ops.minigrad.tensor import Array, Op, Tensor


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of LeNet, as medians over steps.

    pool_2_backward_s: the gradient of the second pooling layer, which backward reaches first. backward_s: all of backward.
    """

    forward_s: float
    pool_2_backward_s: float
    pool_1_backward_s: float
    backward_s: float


class PoolingStopwatch:
    """The seconds of each pooling layer's gradient, in the order of backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []

    @contextmanager
    def lap(self, op: Op) -> Iterator[None]:
        """Time `op` if it is a pooling layer."""
        if not isinstance(op, MaxPooling):
            yield
            return
        began_s = clock(self.device)
        yield
        self.seconds.append(clock(self.device) - began_s)


def time_steps(lenet: Module, images: Array, labels: Array, steps: int) -> StepTimes:
    """Return medians over `steps` forwards and backwards on one batch, after one that is not counted.

    No weight changes.
    """
    device, rows = images.device, []
    for _ in range(steps + 1):
        stopwatch = PoolingStopwatch(device)
        began_s = clock(device)
        loss = softmax_cross_entropy(lenet(Tensor(images)), labels)
        forward_ended_s = clock(device)
        backward(loss, stopwatch=stopwatch)
        pool_2, pool_1 = stopwatch.seconds
        rows.append((forward_ended_s - began_s, pool_2, pool_1, clock(device) - forward_ended_s))
    for parameter in lenet.parameters():
        parameter.grad = None
    return StepTimes(*(statistics.median(column) for column in zip(*rows[1:], strict=True)))
