"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): torch's fused one, or with moments in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gptscale.common.optim.compact_adamw import CompactAdamW
from gptscale.common.optim.fused import decay_groups
from gptscale.common.settings.run_config import RunConfig


def fused(parameters: dict[str, nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    """Return an optimizer that divides by `grad_scale` as it reads gradients, and changes nothing if `found_inf` is set."""
    groups, betas = decay_groups(parameters.values(), config.weight_decay), (config.beta1, config.beta2)
    if config.optimizer_state == "fp32":
        return torch.optim.AdamW(groups, lr=config.peak_lr, betas=betas, fused=True)
    return CompactAdamW(groups, lr=config.peak_lr, betas=betas, form=config.optimizer_state)


def of_torch(config: RunConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return torch's class and its options, for a library to build or wrap."""
    return torch.optim.AdamW, {"lr": config.peak_lr, "betas": (config.beta1, config.beta2), "fused": True}
