"""Fully sharded data parallelism through Hugging Face Accelerate, whose plugin calls torch's `fully_shard`.

What is sharded        as `fsdp`: the batch, and dim 0 of every parameter, its gradient and its optimizer state
What is communicated   as `fsdp`, but without naming the next block to prefetch: torch's own order is used
Memory per device      16 N / d bytes + one or two gathered blocks + activations; while it starts, whole weights as well (4N),
                       because the model is made first and cut afterwards
Wins                   when a code base is on Accelerate already: the same script runs DDP, FSDP or DeepSpeed by a plugin
Loses                  to `fsdp` in reach: HSDP, prefetch and per-step control need torch's functions themselves
Source                 huggingface.co/docs/accelerate, "FSDP1 vs FSDP2"; Zhao et al. 2023 (arXiv 2304.11277)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.optim import Optimizer

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class AccelerateFSDPConfig(RecipeConfig):
    """Options of Accelerate's FullyShardedDataParallelPlugin, in its own spelling."""

    formula: ClassVar[str] = "16 N / d"
    reshard_after_forward: bool = True
    """Free a block's gathered weights after forward and gather again in backward (ZeRO-3); False keeps them (ZeRO-2)."""


def shard(
    model: nn.Module, optimizer: Optimizer, block_classes: set[type[nn.Module]], dtype: torch.dtype, **options: Any
) -> tuple[Accelerator, nn.Module, Any]:
    """Let Accelerate cut `model` and `optimizer`, with each of `block_classes` as a unit and the plugin's own `options`."""
    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[each.__name__ for each in block_classes],
        mixed_precision_policy=MixedPrecisionPolicy(dtype, torch.float32),
        **options,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=next(model.parameters()).is_cpu)
    # On CPUs, and with one process, Accelerate would drop the plugin without a word, and wrap in DDP or nothing.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator, *accelerator.prepare(model, optimizer)


def build(run: Run, config: AccelerateFSDPConfig) -> TorchEngine:
    """Build the GPT and torch's optimizer, and let Accelerate prepare them."""
    import torch.distributed as dist

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.model.precision import DTYPES
    from gptscale.common.optim.library import LibraryOptimizer, make_torch_optimizer

    model = materialise(meta_gpt(run), run, run.world.device)
    unsharded = make_torch_optimizer(model, run.config)
    dtype, options = DTYPES[run.config.precision], {"reshard_after_forward": config.reshard_after_forward}
    accelerator, sharded, optimizer = shard(model, unsharded, {model.block}, dtype, **options)
    parameters = dict(sharded.named_parameters())

    def clip(max_norm: float) -> Any:
        return accelerator.clip_grad_norm_(parameters.values(), max_norm)

    stepper = LibraryOptimizer(optimizer, optimizer.optimizer, parameters, run.config, clip=clip)
    return TorchEngine(run, sharded, stepper, group=dist.group.WORLD, backward=accelerator.backward)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("accelerate_fsdp")
