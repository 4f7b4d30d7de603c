"""Fully sharded data parallelism through Hugging Face Accelerate: its plugin calls torch's `fully_shard`.

What is sharded        as `fsdp`: the batch, and dim 0 of every parameter, its gradient and its optimizer state
What is communicated   as `fsdp`, without its prefetch of the next block by name: torch's own order is used
Memory per device      16 N / d bytes + one or two gathered blocks + activations; while it starts, whole weights besides:
                       the model is made, then cut (4N)
Wins                   when a code base is on Accelerate already: the same script runs DDP, FSDP or DeepSpeed by a plugin
Loses                  to `fsdp` in reach: HSDP, prefetch and per-step control need torch's functions themselves
Source                 huggingface.co/docs/accelerate, "FSDP1 vs FSDP2"; Zhao et al. 2023 (arXiv 2304.11277)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import Block
from gptscale.common.model.precision import DTYPES
from gptscale.common.optim.library import LibraryOptimizer, make_torch_optimizer
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class AccelerateFSDPConfig(RecipeConfig):
    """Accelerate's own spelling (FullyShardedDataParallelPlugin)."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after forward and gather again in backward (ZeRO-3); False keeps them (ZeRO-2)."""


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: AccelerateFSDPConfig,
    block_class: type[nn.Module],
    compute_dtype: torch.dtype,
    **options: Any,
) -> tuple[Accelerator, nn.Module, Any]:
    """Accelerate's hand on `model` and `optimizer`, each `block_class` a unit; options are Accelerator's."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=config.reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block_class.__name__],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
    )
    accelerator = Accelerator(fsdp_plugin=plugin, **options)
    # On CPUs, and alone, it drops the plugin and wraps in DDP or nothing, without a word: put it on the path it says.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator, *accelerator.prepare(model, optimizer)


def build(run: Run, config: AccelerateFSDPConfig) -> TorchEngine:
    """The GPT and torch's optimizer, prepared by Accelerate."""
    model = materialise(meta_gpt(run), run, run.world.device)
    made, dtype, on_cpu = (
        make_torch_optimizer(model, run.config),
        DTYPES[run.config.precision],
        run.world.device.type == "cpu",
    )
    accelerator, sharded, optimizer = shard(model, made, config, Block, dtype, cpu=on_cpu)
    parameters = dict(sharded.named_parameters())
    stepper = LibraryOptimizer(
        optimizer,
        optimizer.optimizer,
        parameters,
        run.config,
        clip=lambda max_norm: accelerator.clip_grad_norm_(parameters.values(), max_norm),
        zero_grad=optimizer.zero_grad,
    )
    return TorchEngine(run, sharded, stepper, group=dist.group.WORLD, backward=accelerator.backward)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("accelerate_fsdp")
