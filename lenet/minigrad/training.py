"""The training loop of the autograd experiment, and the measurement after each epoch, on images in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gptscale.common.errors import NumericError
from gptscale.common.settings.learning_rate import learning_rate
from gptscale.ops.minigrad.backward import OpStopwatch, backward
from gptscale.ops.minigrad.layers import Module
from gptscale.ops.minigrad.loss import softmax_cross_entropy
from gptscale.ops.minigrad.optimizers import Optimizer
from gptscale.ops.minigrad.tensor import Array, Tensor, recording

EVALUATION_BATCH_SIZE = 1000


@dataclass(frozen=True)
class Samples:
    """Images (n, channels, height, width) with values from 0 to 1, and their integer labels (n,)."""

    images: Array
    labels: Array

    def to(self, device: torch.device) -> Samples:
        """Return a copy on the device."""
        return Samples(self.images.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Epoch:
    """The losses (in nats) and errors (fractions) with the weights at the end of an epoch.

    epoch_time_s: seconds of the training alone, without the measurement that follows it. epoch_cpu_s: processor seconds of the
    same, of all threads, which say more than wall time where other programs share the machine.
    """

    epoch: int
    train_loss: float
    train_err: float
    test_loss: float
    test_err: float
    epoch_time_s: float
    epoch_cpu_s: float


def train_step(
    model: Module, optimizer: Optimizer, images: Array, labels: Array, *, stopwatch: OpStopwatch | None = None
) -> Tensor:
    """Take one step on one batch and return its loss, which was computed before the step."""
    optimizer.zero_grad()
    loss = softmax_cross_entropy(model(Tensor(images)), labels)
    backward(loss, stopwatch=stopwatch)
    optimizer.step()
    return loss


def train(
    model: Module, optimizer: Optimizer, train: Samples, test: Samples, *, epochs: int, batch_size: int, seed: int
) -> Iterator[Epoch]:
    """Train and yield the figures of each epoch.

    The learning rate falls to 0 on half a cosine. Each epoch takes every sample once in an order of its own, including an
    incomplete last batch. Raises NumericError when the loss is not finite.
    """
    random = torch.Generator().manual_seed(seed)
    steps_per_epoch = -(-len(train) // batch_size)
    peak, step = optimizer.lr, 0
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=random).to(train.labels.device)
        began_s, cpu_began_s = clock(train.images.device), time.process_time()
        for batch in order.split(batch_size):
            optimizer.lr = learning_rate(step, peak=peak, total_steps=epochs * steps_per_epoch, min_ratio=0.0)
            train_step(model, optimizer, train.images[batch], train.labels[batch])
            step += 1
        seconds, cpu_s = clock(train.images.device) - began_s, time.process_time() - cpu_began_s
        yield Epoch(epoch, *evaluate(model, train), *evaluate(model, test), seconds, cpu_s)


def evaluate(model: Module, samples: Samples) -> tuple[float, float]:
    """Return the mean loss in nats and the fraction of samples whose largest logit is not at their label."""
    loss = wrong = 0.0
    with recording(False):
        for first in range(0, len(samples), EVALUATION_BATCH_SIZE):
            labels = samples.labels[first : first + EVALUATION_BATCH_SIZE]
            logits = model(Tensor(samples.images[first : first + EVALUATION_BATCH_SIZE]))
            loss += softmax_cross_entropy(logits, labels).array.item() * len(labels)
            wrong += (logits.array.argmax(-1) != labels).sum().item()
    if not loss < float("inf"):
        raise NumericError(f"the loss is {loss}", "after an epoch", "lower --lr")
    return loss / len(samples), wrong / len(samples)


def clock(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
