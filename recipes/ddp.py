"""Distributed data parallelism: every device holds everything and sees its share of the batch.

What is sharded        the batch, over d devices
What is communicated   gradients, all-reduced in buckets while backward still runs: each device sends 2 (d-1)/d x 4N bytes
                       per optimizer step, and nothing during accumulation
Memory per device      16 N bytes + activations, as `single`; gradients live in the buckets, not twice (bucket views)
Wins                   when one device holds the whole state: least communication of all, and backward hides it
Loses                  when one device does not; when links are slow and micro-batches small (raise grad_accum_steps)
Source                 Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import check_range

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class DDPConfig(RecipeConfig):
    """Options of torch's DistributedDataParallel, in its own spelling."""

    bucket_cap_mb: float = 25.0
    """Gradients are all-reduced when a bucket of this many MiB is full."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way."""

    def __post_init__(self) -> None:
        check_range(self.bucket_cap_mb, 0.01, 10_000, "bucket_cap_mb")


def shard(model: nn.Module, bucket_cap_mb: float = 25.0, static_graph: bool = False) -> DistributedDataParallel:
    """Return a replica of `model` whose backward averages gradients over the default process group."""
    from torch.nn.parallel import DistributedDataParallel

    replica = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb,
        # Gradients lie in the buckets themselves, not in a second copy.
        gradient_as_bucket_view=True,
        static_graph=static_graph,
    )
    # The GPT has no buffers, and vision models average theirs before use. torch 2.15 deprecates the argument of that name.
    replica.broadcast_buffers = False
    return replica


def build(run: Run, config: DDPConfig) -> TorchEngine:
    """Build the whole model on each device and average gradients in the last micro-batch of each step."""
    import torch.distributed as dist

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.optim.fused import FusedOptimizer

    model = materialise(meta_gpt(run), run, run.world.device)
    replica = shard(model, config.bucket_cap_mb, config.static_graph)
    # The context manager `no_sync` sets this, too. Contexts would be nested.
    sync = partial(setattr, replica, "require_backward_grad_sync")
    optimizer = FusedOptimizer(dict(model.named_parameters()), run.config)
    return TorchEngine(run, replica, optimizer, group=dist.group.WORLD, set_grad_sync=sync)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("ddp")
