"""SGD without momentum, for parity of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gptscale.common.optim.fused import decay_groups
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import local


def fused(parameters: dict[str, nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """Return an optimizer that divides gradients by `grad_scale`, and changes nothing if `found_inf` is set."""
    return PlainSGD(decay_groups(parameters.values(), config.weight_decay), {"lr": config.peak_lr})


def of_torch(config: RunConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return torch's class and its options, for a library to build or wrap."""
    return torch.optim.SGD, {"lr": config.peak_lr}


class PlainSGD(torch.optim.Optimizer):
    """SGD without momentum on local shards: w -= lr (g / grad_scale + weight_decay w), unless found_inf is set.

    The fused SGD of torch has no rule for DTensors (2.11), and its other forms ignore grad_scale and found_inf.
    """

    grad_scale: Tensor
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                weight = local(p)
                update = local(p.grad) / self.grad_scale + group["weight_decay"] * weight
                weight.sub_(torch.where(self.found_inf > 0, 0.0, group["lr"] * update))
