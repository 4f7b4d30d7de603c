"""The images of the autograd experiment, its training loop, and the times of one step by operation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from gptscale.common.errors import ConfigError, DataError, NumericError
from gptscale.common.measure.speed import synchronize
from gptscale.common.settings.learning_rate import learning_rate
from gptscale.lenet.data.sources import LabelledImages, VisionData, open_data
from gptscale.lenet.minigrad.convolution import MaxPooling
from gptscale.lenet.minigrad.layers import Module, softmax_cross_entropy
from gptscale.lenet.minigrad.optimizers import Optimizer
from gptscale.lenet.minigrad.tensor import Array, Op, Tensor, backward, recording

# Side of the images in pixels, which the models are made for.
SIDE = 28
CLASSES = 10
EVALUATION_BATCH_SIZE = 1000


def open_digits(
    data: str, root: Path = Path(), train_samples: int | None = None, *, download: bool = False
) -> VisionData:
    """Open the images that --data of a vision run names, which must be grey images of the ten digits, with values from 0 to 1.

    train_samples: number of training images, the first ones, or None for all.
    """
    data_set = open_data(data, root=root, image_size=SIDE, download=download)
    if data_set.channels != 1 or len(data_set.classes) != CLASSES:
        shape = f"{data_set.channels} channels and {len(data_set.classes)} classes"
        raise DataError(f"images with {shape}", f"in {data}", "give grey images of the ten digits")
    n = len(data_set.train)
    if train_samples is not None and train_samples > n:
        raise ConfigError(f"{train_samples} of {n} images", "in --train-samples", f"use 1 to {n}")
    train, test = (
        LabelledImages(part.images[:most].float() / 255, part.labels[:most])
        for part, most in ((data_set.train, train_samples), (data_set.test, None))
    )
    return replace(data_set, train=train, test=test)


def is_whole_mnist(digits: VisionData) -> bool:
    """Return whether the images are all of MNIST, on which report B's figures were measured."""
    return (digits.name, len(digits.train), len(digits.test)) == ("MNIST", 60_000, 10_000)


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


def train_step(model: Module, optimizer: Optimizer, images: Array, labels: Array) -> Tensor:
    """Take one step on one batch and return its loss, which was computed before the step."""
    optimizer.zero_grad()
    loss = softmax_cross_entropy(model(Tensor(images)), labels)
    backward(loss)
    optimizer.step()
    return loss


def train(
    model: Module, optimizer: Optimizer, train: LabelledImages, test: LabelledImages, *,
    epochs: int, batch_size: int, seed: int,
) -> Iterator[Epoch]:  # fmt: skip
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


def evaluate(model: Module, samples: LabelledImages) -> tuple[float, float]:
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


class StepTimes(NamedTuple):
    """Seconds of one step of LeNet, as medians over steps.

    pool_2_backward_s: the gradient of the second pooling layer, which backward reaches first. backward_s: all of backward.
    """

    forward_s: float
    pool_2_backward_s: float
    pool_1_backward_s: float
    backward_s: float


def time_steps(lenet: Module, images: Array, labels: Array, steps: int) -> StepTimes:
    """Return medians over `steps` forwards and backwards on one batch, after one that is not counted.

    No weight changes.
    """
    device, rows = images.device, []
    for _ in range(steps + 1):
        pools_s: list[float] = []

        @contextmanager
        def around(op: Op, pools_s: list[float] = pools_s) -> Iterator[None]:
            began_s = clock(device)
            yield
            if isinstance(op, MaxPooling):
                pools_s.append(clock(device) - began_s)

        began_s = clock(device)
        loss = softmax_cross_entropy(lenet(Tensor(images)), labels)
        forward_ended_s = clock(device)
        backward(loss, around=around)
        rows.append((forward_ended_s - began_s, *pools_s, clock(device) - forward_ended_s))
    for parameter in lenet.parameters():
        parameter.grad = None
    return StepTimes(*(statistics.median(column) for column in zip(*rows[1:], strict=True)))


def clock(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the time in seconds."""
    synchronize(device)
    return time.perf_counter()
