"""ZeRO 1 and 2 by fairscale: each parameter has one owner, which receives its gradient and holds its optimizer state.

What is sharded        the batch; optimizer state and (outside accumulation) gradients, whole parameters at a time
What is communicated   gradients reduced to their owners while backward runs, (d-1)/d x 4N bytes per device and optimizer
                       step; new weights broadcast by their owners, (d-1)/d x 4N; nothing during accumulation
Memory per device      4 N + 4 N + 8 N / d bytes (weights, gradients and buckets, AdamW state) + activations; N / d as even
                       as whole parameters allow: the token table is one
Wins                   over DDP when AdamW's state is what does not fit; needs nothing compiled
Loses                  to fsdp and DeepSpeed, which cut evenly and cut weights too; the library is no longer developed
Source                 Rajbhandari et al. 2020 (arXiv 1910.02054); fairscale.readthedocs.io, "OSS and ShardedDDP"

The trap               Gradients of small parameters live in buckets, as views. OSS's own `zero_grad` sets them to None. The
                       next backward then fills new tensors outside the buckets, and the buckets are reduced as they were:
                       from its second step on, the model trains on stale gradients, and the loss still falls. `shard` gives
                       OSS ShardedDataParallel's, which keeps the views (measured both ways in docs/measurements/LOG.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    import torch
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS
    from torch import nn

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class FairscaleSDPConfig(RecipeConfig):
    """Options of fairscale's ShardedDataParallel, in its own spelling."""

    formula: ClassVar[str] = "4 N + 4 N + 8 N / d"
    reduce_buffer_size: int = 2**23
    """Elements of a bucket for small gradients; 0 reduces each by itself."""


def shard(
    model: nn.Module,
    config: FairscaleSDPConfig,
    groups: list[dict[str, Any]],
    kind: type[torch.optim.Optimizer],
    **options: Any,
) -> tuple[ShardedDataParallel, OSS]:
    """Return `model` and an optimizer of `kind` over its parameter `groups`, both sharded by whole parameters.

    Clip with `clip_grad_norm` of the optimizer, since a rank has the gradients of its own parameters alone.
    """
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(groups, optim=kind, **options)
    sharded = ShardedDataParallel(model, optimizer, reduce_buffer_size=config.reduce_buffer_size)
    optimizer.zero_grad = sharded.zero_grad
    return sharded, optimizer


def build(run: Run, config: FairscaleSDPConfig) -> TorchEngine:
    """Build the whole model on each device, and a cut optimizer."""
    import torch.distributed as dist

    from gptscale.common.engines.torch_engine import TorchEngine, holding_back
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.optim.fused import decay_groups
    from gptscale.common.optim.library import LibraryOptimizer, torch_optimizer

    model = materialise(meta_gpt(run), run, run.world.device)
    groups = decay_groups(model.parameters(), run.config.weight_decay)
    kind, options = torch_optimizer(run.config)
    sharded, oss = shard(model, config, groups, kind, **options)
    stepper = LibraryOptimizer(oss, oss.optim, dict(model.named_parameters()), run.config, clip=oss.clip_grad_norm)
    return TorchEngine(run, sharded, stepper, group=dist.group.WORLD, set_grad_sync=holding_back(sharded.no_sync))


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("fairscale_sdp")
