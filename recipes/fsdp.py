"""Fully sharded data parallelism: weights, gradients and optimizer state cut over the devices, gathered block by block.

What is sharded        the batch, and dim 0 of every parameter, its gradient and its optimizer state, over d devices
What is communicated   per micro-batch: weights all-gathered for forward, and again for backward if they were resharded
                       (2 x (d-1)/d x bN bytes, b bytes per weight in the compute type), gradients reduce-scattered
                       ((d-1)/d x 4N bytes); all of it overlaps with the neighbouring block's work
Memory per device      16 N / d bytes + one or two gathered blocks + activations; under HSDP, with r replicas, 16 N r / d
fsdp_offload           the 16 N / d bytes live in host memory, the optimizer steps on the CPU; shards cross the bus each use
Wins                   when one device cannot hold the state and links are fast (NVLink, InfiniBand)
Loses                  to DDP whenever DDP fits; on slow links; with micro-batches too small to hide a gather
Source                 Zhao et al. 2023 (arXiv 2304.11277); ZeRO stage 3, Rajbhandari et al. 2020 (arXiv 1910.02054)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import check_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.gpt import Decoder
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class FSDPConfig(RecipeConfig):
    """Options of torch.distributed.fsdp.fully_shard, in torch's own spelling."""

    reshard_after_forward: bool = True
    """Free a block's gathered weights after forward and gather again in backward (ZeRO-3); False keeps them (ZeRO-2)."""
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of use."""
    dp_replicate_size: int = 1
    """Shard groups that replicate each other (HSDP); gradients are all-reduced between them."""
    sync_every_micro_batch: bool = True
    """Reduce-scatter after each micro-batch; False accumulates whole gradients: less traffic, 4 N bytes more."""
    cpu_offload: bool = False
    """Keep shards and optimizer state in host memory (recipe fsdp_offload)."""

    def __post_init__(self) -> None:
        check_ranges(self, {"prefetch": (1, 4096), "dp_replicate_size": (1, 4096)})

    @property
    def offload(self) -> str:
        return "cpu" if self.cpu_offload else "none"

    def state_formula(self, run: Run) -> str:
        replicas = f" {self.dp_replicate_size}" if self.dp_replicate_size > 1 else ""
        return f"16 N{replicas} / d"

    def check(self, run: Run) -> None:
        """Raise ConfigError unless the replicas divide the world."""
        world_size = run.world.world_size
        if world_size % self.dp_replicate_size:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            what = f"world {world_size} is not divisible by dp_replicate_size {self.dp_replicate_size}"
            raise ConfigError(what, "in --dp-replicate-size", f"use one of {divisors}")


def shard(
    model: nn.Module, block_class: type[nn.Module], config: FSDPConfig, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> FSDPModule:
    """Cut each `block_class` in `model`, then what remains, over `mesh`: a 2-D one replicates over its first axis (HSDP)."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32)}
    if config.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, block_class)]
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **policy)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + config.prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - config.prefetch) : i][::-1])
    # Backward needs the root's tables and last norm again at once: resharding them would only gather them twice.
    return fully_shard(model, reshard_after_forward=False, **policy)


def build(run: Run, config: FSDPConfig) -> TorchEngine:
    """Shard on the meta device, so that no process ever holds the whole model, then fill each shard."""
    from gptscale.common.model.build import meta_gpt

    return build_over(meta_gpt(run), run, config)


def build_over(
    model: Decoder, run: Run, config: FSDPConfig, cut: Callable[[Tensor], Tensor] | None = None
) -> TorchEngine:
    """Shard a model that is on the meta device over the whole world. cut: as in TorchEngine."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.build import materialise
    from gptscale.common.model.precision import DTYPES
    from gptscale.common.optim.fused import FusedOptimizer

    world = run.world
    sizes = {"dp_shard": world.world_size // config.dp_replicate_size}
    if config.dp_replicate_size > 1:
        sizes = {"dp_replicate": config.dp_replicate_size, **sizes}
    mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    root = shard(model, model.block, config, mesh, DTYPES[run.config.precision])
    materialise(model, run, torch.device("cpu") if config.cpu_offload else world.device)

    def set_grad_sync(on: bool) -> None:
        root.set_requires_gradient_sync(on or config.sync_every_micro_batch)
        root.set_is_last_backward(on)

    parameters = dict(model.named_parameters())
    optimizer = FusedOptimizer(parameters, run.config, shards=dist.group.WORLD, offloaded=config.cpu_offload)
    return TorchEngine(run, model, optimizer, group=dist.group.WORLD, cut=cut, set_grad_sync=set_grad_sync)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("fsdp")
