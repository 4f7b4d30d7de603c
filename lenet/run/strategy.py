"""What splits the batch over processes: the strategy, and the backend that gradients are exchanged by."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World
from gptscale.lenet.run.config import VisionConfig


def strategy_of(config: VisionConfig, world: World) -> str:
    """The strategy's name with auto resolved."""
    if config.strategy == "auto":
        return "ddp" if world.world_size > 1 else "single"
    return config.strategy


def backend_of(config: VisionConfig, world: World) -> str | None:
    """What ranks exchange gradients by, None where nothing is exchanged; ConfigError for what this run cannot have."""
    if strategy_of(config, world) not in ("ddp", "fabric"):
        if config.backend != "auto":
            fix = "leave it out, or use --nproc 2"
            raise ConfigError(f"one process needs no {config.backend}", "in --backend", fix)
        return None
    on_cuda = world.device.type == "cuda"
    if config.backend == "nccl" and not (on_cuda and dist.is_nccl_available()):
        raise ConfigError("nccl needs CUDA devices", "in --backend", "use gloo")
    if config.backend != "auto":
        return config.backend
    return "nccl" if on_cuda else "gloo"


def check_strategy(config: VisionConfig, world: World) -> None:
    """ConfigError for a strategy that this world, or what is installed, cannot have."""
    if config.strategy in ("single", "dataparallel") and world.world_size > 1:
        what = f"{config.strategy} is one process, not {world.world_size}"
        raise ConfigError(what, "in --strategy", "use --nproc 1, or --strategy ddp")
    if config.strategy == "dataparallel" and (world.device.type != "cuda" or torch.cuda.device_count() < 2):
        raise ConfigError("dataparallel needs two or more GPUs", "in --strategy", "use single or ddp")
    if config.strategy == "fabric":
        try:
            import lightning_fabric  # noqa: F401
        except ImportError:
            fix = "pip install 'gptscale[lightning-fabric]'"
            raise ConfigError("Lightning Fabric is not installed", "in --strategy fabric", fix) from None


def make_fabric(world: World) -> Any:
    """Lightning's Fabric with its DDPStrategy over the process group that runs already."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
    machine: dict[str, Any] = {"accelerator": world.device.type, "devices": local_size}
    strategy = DDPStrategy(broadcast_buffers=False)
    fabric = Fabric(
        strategy=strategy, plugins=[TorchElasticEnvironment()], num_nodes=world.world_size // local_size, **machine
    )
    fabric.launch()
    return fabric
