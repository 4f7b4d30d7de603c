"""The nets of `gptscale lenet fused`: each trained in one of the ways that the device has, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.measure.speed import synchronize
from gptscale.lenet.models.registry import Convolutions, build_model
from gptscale.lenet.run.loop import TestSet
from gptscale.lenet.run.preflight import VisionPlan


@dataclass(frozen=True)
class NetVariant:
    """One way to compute a net: on which device, by the fused operator or not, with cuDNN or not."""

    name: str
    device: torch.device
    fused: bool = False
    cudnn: bool = True


@dataclass(frozen=True)
class NetFigures:
    """The measurements of one net in one variant: seconds of all steps, first and last loss, and test accuracy."""

    forward_s: float
    backward_s: float
    loss_first: float
    loss_last: float
    accuracy: float


def variants(device: torch.device) -> list[NetVariant]:
    """Return two variants on the CPU, and with a GPU also the other three of report D."""
    cpu = torch.device("cpu")
    on_cpu = [NetVariant("CPU", cpu), NetVariant("CPU, fused", cpu, fused=True)]
    if device.type != "cuda":
        return on_cpu
    cudnn_off = NetVariant("cuDNN off", device, cudnn=False)
    return [NetVariant("cuDNN", device), NetVariant("fused", device, fused=True), cudnn_off, *on_cpu]


def train(net: str, variant: NetVariant, plan: VisionPlan) -> NetFigures:
    """Train `net` with the options of the plan and return its measurements.

    Forward and backward each end by waiting for the device, so that their sum is no step time.
    """
    model = build_model(net, plan.shape, seed=plan.config.seed).to(variant.device)
    assert isinstance(model, Convolutions)
    model.fused = variant.fused
    optimizer = torch.optim.Adam(model.parameters(), lr=plan.config.lr, fused=True)
    losses: list[Tensor] = []
    times = {"forward": 0.0, "backward": 0.0}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        synchronize(variant.device)
        began = time.perf_counter()
        result = work()
        synchronize(variant.device)
        times[name] += time.perf_counter() - began
        return result

    loader = plan.loader()
    with cudnn(variant):
        for step in range(plan.steps):
            epoch, place = divmod(step, plan.batch_order.steps_per_epoch)
            if place == 0:
                batches = loader.epoch(epoch)
            images, labels = next(batches)
            loss = timed("forward", partial(_loss, model, images, labels))
            timed("backward", loss.backward)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        accuracy = _accuracy(model, plan)
    return NetFigures(times["forward"], times["backward"], losses[0].item(), losses[-1].item(), accuracy)


def cudnn(variant: NetVariant) -> AbstractContextManager[None]:
    """Return a context in which cuDNN is off for a variant without it."""
    return nullcontext() if variant.cudnn else torch.backends.cudnn.flags(enabled=False)  # type: ignore[no-any-return]


def _loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


@torch.no_grad()
def _accuracy(model: nn.Module, plan: VisionPlan) -> float:
    hits = [model(images).argmax(1) == labels for images, labels in TestSet(plan).batches()]
    return torch.cat(hits).float().mean().item()
