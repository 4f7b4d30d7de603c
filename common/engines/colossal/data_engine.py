"""Engines over what Colossal-AI's LowLevelZeroPlugin and GeminiPlugin make of a model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from gptscale.common.engines.colossal.gpt2 import GPT2WithLoss
from gptscale.common.engines.colossal.hybrid import WholeModel
from gptscale.common.engines.colossal.weights import named_parameters
from gptscale.common.engines.colossal.zero import GeminiStepper, ZeroOptimizer
from gptscale.common.engines.torch_engine import TorchEngine, holding_back
from gptscale.common.optim.fused import decay_groups
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig


def hybrid_adam(model: nn.Module, config: RunConfig) -> Any:
    """Colossal-AI's AdamW, for tensors on the device and on the host: the only kind that Gemini steps with."""
    from colossalai.nn.optimizer import HybridAdam

    groups = decay_groups(model.parameters(), config.weight_decay)
    return HybridAdam(groups, lr=config.peak_lr, betas=(config.beta1, config.beta2), adamw_mode=True)


def zero_engine(run: Run, stage: int, model: GPT2WithLoss, boosted: tuple[Any, Any]) -> TorchEngine:
    """Stage 1 holds gradients back while they accumulate; stage 2 reduces after every micro-batch."""
    whole, optimizer = boosted
    return TorchEngine(
        run,
        WholeModel(whole),
        ZeroOptimizer(run, optimizer, named_parameters(model.hf, run.gpt)),
        group=dist.group.WORLD,
        set_grad_sync=holding_back(optimizer.no_sync) if stage == 1 else lambda on: None,
        backward=optimizer.backward,
    )


def gemini_engine(run: Run, model: GPT2WithLoss, boosted: tuple[Any, Any]) -> TorchEngine:
    """Gemini reduces after every micro-batch."""
    whole, optimizer = boosted
    stepper = GeminiStepper(run, optimizer, named_parameters(model.hf, run.gpt))
    return TorchEngine(run, WholeModel(whole), stepper, group=dist.group.WORLD, backward=optimizer.backward)
