"""Optimizers of vision runs with their state allocated at the start, and the loss scaler of fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gptscale.common.model.precision import LossScale
from gptscale.lenet.run.config import VisionConfig


class HalfSGD(torch.optim.SGD):
    """SGD for weights in bf16 or fp16 on a CPU, with each step in fp32 and one rounding of weights and momentum.

    torch's fused SGD leaves such weights unchanged, all but a few at the end of each tensor (with torch 2.11,
    github.com/pytorch/pytorch/issues/191763). Like a fused optimizer, it gets the loss scale and the overflow from GradScaler.
    """

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step, or none if gradients overflowed. `closure` computes the gradients, where it is given."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        if bool(getattr(self, "found_inf", False)):
            return
        scale = getattr(self, "grad_scale", 1.0)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                change = p.grad.float() / scale + group["weight_decay"] * p.float()
                if group["momentum"]:
                    momentum = self.state[p]["momentum_buffer"]
                    change += group["momentum"] * momentum.float()
                    momentum.copy_(change)
                p.copy_(p.float() - group["lr"] * change)


def make_optimizer(config: VisionConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer with its state allocated, into which a checkpoint can be loaded before the first step."""
    parameters = list(model.parameters())
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        if parameters[0].device.type == "cpu" and parameters[0].dtype != torch.float32:
            optimizer: torch.optim.Optimizer = HalfSGD(parameters, momentum=config.momentum, **common)
        else:
            optimizer = torch.optim.SGD(parameters, momentum=config.momentum, fused=True, **common)
        for p in parameters if config.momentum else []:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return optimizer
    adam_class = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    optimizer = adam_class(parameters, fused=True, **common)
    for p in parameters:
        optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return optimizer


def make_scaler(config: VisionConfig, device: torch.device) -> tuple[torch.amp.GradScaler, float | None]:
    """Return the scaler of fp16's loss and the number at which its scale is fixed, None for a dynamic scale.

    The scaler is switched off for precisions without a loss scale. A step whose gradients overflow is skipped with a fixed and
    with a dynamic scale, but only the dynamic scale is halved then.
    """
    scale = config.resolved_loss_scale
    enabled = scale not in (None, "none")
    fixed = float(scale) if enabled and scale != "dynamic" else None  # type: ignore[arg-type]
    return torch.amp.GradScaler(device.type, init_scale=fixed or LossScale.START, enabled=enabled), fixed
