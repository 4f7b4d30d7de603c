"""Distributed data parallelism: every device holds everything and sees its share of the batch.

What is sharded        the batch
What is communicated   gradients, all-reduced in buckets while backward still runs: 2 (d-1)/d x 4N bytes sent per device
                       and optimizer step; nothing during accumulation
Memory per device      16 N bytes + activations, as `single` (bucket views: gradients live in the buckets, not twice)
Wins                   when one device holds the whole state: least communication of all, and it overlaps with backward
Loses                  when it does not; when links are slow and micro-batches small (raise grad_accum_steps)
Source                 Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.errors import ConfigError
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class DDPConfig(RecipeConfig):
    """torch's own spelling."""

    bucket_cap_mb: float = 25.0
    """Gradients are all-reduced when a bucket of this many MiB is full."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.bucket_cap_mb <= 10_000:
            raise ConfigError(
                f"bucket_cap_mb {self.bucket_cap_mb} is out of range", "in --bucket-cap-mb", "use 0.01 to 10000"
            )


def shard(model: nn.Module, config: DDPConfig) -> DistributedDataParallel:
    """Replicas of `model` whose backward averages gradients over the default process group."""
    return DistributedDataParallel(
        model,
        bucket_cap_mb=config.bucket_cap_mb,
        # The GPT has no buffers; the vision models average their batch norms' statistics before they are used.
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        static_graph=config.static_graph,
        init_sync=False,  # every rank built the same weights; nothing to broadcast
    )


def build(run: Run, config: DDPConfig) -> TorchEngine:
    """The whole model on each device, gradients averaged; `no_sync` on all micro-batches but the last."""
    model = materialise(meta_gpt(run), run, run.world.device)
    replica = shard(model, config)

    def set_grad_sync(on: bool) -> None:
        replica.require_backward_grad_sync = on  # what the context manager `no_sync` sets, without nesting contexts

    optimizer = FusedOptimizer(dict(model.named_parameters()), run.config)
    return TorchEngine(run, replica, optimizer, group=dist.group.WORLD, set_grad_sync=set_grad_sync)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("ddp")
