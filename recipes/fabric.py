"""A strategy chosen by name through Lightning Fabric, `ddp` or `fully_shard`, while the training loop stays ours.

What is sharded        the batch; with fully_shard also dim 0 of every parameter, its gradient and its optimizer state
What is communicated   ddp: gradients all-reduced in buckets, 2 (d-1)/d x 4N bytes per device and optimizer step;
                       fully_shard: weights gathered for forward and backward, gradients reduce-scattered, as in `fsdp`
Memory per device      ddp: 16 N bytes + activations; fully_shard: 16 N / d + gathered blocks + activations; 4N as it starts
Wins                   when a code base is on Fabric: one word changes strategy, precision or launcher
Loses                  in reach: what `ddp` and `fsdp` can set, Fabric often cannot
Source                 lightning.ai/docs/fabric; Li et al. 2020 (arXiv 2006.15704); Zhao et al. 2023 (arXiv 2304.11277)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class LightningFabricConfig(RecipeConfig):
    """Options of Lightning Fabric."""

    strategy: Literal["ddp", "fully_shard"] = "ddp"
    """DDPStrategy, or ModelParallelStrategy with torch's fully_shard."""

    def state_formula(self, run: Run) -> str:
        return "16 N" if self.strategy == "ddp" else "16 N / d"


def shard(config: LightningFabricConfig, block_class: type[nn.Module], world_size: int, **options: Any) -> Fabric:
    """Return a Fabric whose `setup_module` splits a model by the strategy that `config` names.

    options: Fabric's own. The processes run already, so that Fabric takes its rank from torchrun's environment.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in model.modules():
            if isinstance(module, block_class):
                fully_shard(module, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    class Replicas(DDPStrategy):
        def setup_module(self, module: nn.Module) -> DistributedDataParallel:
            replica = super().setup_module(module)
            # As in recipes/ddp.py.
            replica.broadcast_buffers = False
            return replica

    strategy = Replicas() if config.strategy == "ddp" else ModelParallelStrategy(cut, world_size, 1)
    fabric = Fabric(strategy=strategy, plugins=[TorchElasticEnvironment()], **options)
    fabric.launch()
    return fabric


def build(run: Run, config: LightningFabricConfig) -> TorchEngine:
    """Build the model and torch's optimizer, and let Fabric set them up."""
    import torch.distributed as dist

    from gptscale.common.engines.torch_engine import TorchEngine, holding_back
    from gptscale.common.model.build import materialise, meta_gpt
    from gptscale.common.optim.library import LibraryOptimizer, make_torch_optimizer

    world = run.world
    model = materialise(meta_gpt(run), run, world.device)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
    precision = "bf16-mixed" if run.config.precision == "bf16" else "32-true"
    machine = {"accelerator": world.device.type, "devices": local_size, "num_nodes": world.world_size // local_size}
    fabric = shard(config, model.block, world.world_size, precision=precision, **machine)
    sharded = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(make_torch_optimizer(sharded, run.config))

    def clip(max_norm: float) -> Any:
        return fabric.clip_gradients(sharded, optimizer, max_norm=max_norm, error_if_nonfinite=False)

    stepper = LibraryOptimizer(optimizer, optimizer.optimizer, dict(model.named_parameters()), run.config, clip=clip)
    sync = holding_back(lambda: fabric.no_backward_sync(sharded))
    return TorchEngine(run, sharded, stepper, group=dist.group.WORLD, set_grad_sync=sync, backward=fabric.backward)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("lightning_fabric")
