"""Time what a pipeline's schedule costs a stage for each micro-batch and direction, beside its layers and its messages."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gptscale.foresight.calibrate.timing import Timing, timings
from gptscale.recipes.pipeline import shard

FEW, MORE = 2, 10


class PassOn(nn.Module):
    """A stage that multiplies by one number, and sums at the end."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.weight, self.is_last = nn.Parameter(torch.ones(())), is_last

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the next stage's input, or the loss."""
        y = x * self.weight
        return y.sum() if self.is_last else y


def time_stage(ranks: int, device: torch.device, message_s: float, repeats: int) -> Timing:
    """Return the seconds of a stage's part in one direction of a micro-batch. message_s: of a send of a few bytes."""
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("pp",))
    rank = mesh.get_local_rank()
    calls: dict[int, Callable[[], Any]] = {}
    for n in (ranks * FEW, ranks * MORE):
        part = PassOn(rank == ranks - 1).to(device)
        _, schedule = shard({rank: part}, ranks, mesh, "1F1B", n, _loss, partial(_shapes, ranks=ranks))
        x = torch.zeros(n, 8, device=device)
        inputs, targets = ((x,) if rank == 0 else ()), ({"target": x, "targets": x} if rank == ranks - 1 else {})
        calls[n] = partial(schedule.step, *inputs, **targets, return_outputs=False)
    times = timings(calls, device, repeats)
    (few, few_s), (more, more_s) = ((n, t.seconds) for n, t in times.items())
    # A micro-batch is computed and handed on twice.
    each = (more_s - few_s) / (more - few) / 2
    return Timing(max(each - message_s, 0.1 * each), statistics.fmean(t.spread for t in times.values()), repeats)


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return output


def _shapes(index: int, ranks: int) -> tuple[Tensor, Tensor]:
    activations = torch.empty(1, 8, device="meta")
    return activations, torch.empty((), device="meta") if index == ranks - 1 else activations
