"""The strategies that split the batch over processes, and the backends that exchange gradients.

DDP and Fabric are those of the GPT: `shard` of recipes/ddp.py and of recipes/fabric.py. lenet/run/trainer.py has the Trainer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World
from gptscale.lenet.run.config import BY_TRAINER, OF_PROCESSES, VisionConfig


def strategy_of(config: VisionConfig, world: World) -> str:
    """Return the strategy's name with auto resolved."""
    if config.strategy == "auto":
        return "ddp" if world.world_size > 1 else "single"
    return config.strategy


def backend_of(config: VisionConfig, world: World) -> str | None:
    """Return the backend by which ranks exchange gradients, or None where nothing is exchanged.

    Raises ConfigError for a backend that this run cannot have.
    """
    if strategy_of(config, world) not in OF_PROCESSES:
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
    """Raise ConfigError for a strategy that this world, or this installation, cannot have."""
    if config.strategy in ("single", "dataparallel") and world.world_size > 1:
        what = f"{config.strategy} is one process, not {world.world_size}"
        raise ConfigError(what, "in --strategy", "use --nproc 1, or --strategy ddp")
    if config.strategy == "dataparallel" and (world.device.type != "cuda" or torch.cuda.device_count() < 2):
        raise ConfigError("dataparallel needs two or more GPUs", "in --strategy", "use single or ddp")
    if config.strategy == "fabric" and find_spec("lightning_fabric") is None:
        fix = "pip install 'gptscale[lightning-fabric]'"
        raise ConfigError("Lightning Fabric is not installed", "in --strategy fabric", fix)
    place = f"in --strategy {config.strategy}"
    if config.strategy in BY_TRAINER and find_spec("pytorch_lightning") is None:
        raise ConfigError("Lightning's Trainer is not installed", place, "pip install 'gptscale[lightning-trainer]'")
    if config.strategy in BY_TRAINER and config.precision == "fp16":
        raise ConfigError("the Trainer would not know of fp16's loss scale", place, "use --strategy ddp, or bf16")


def other_devices(config: VisionConfig, world: World) -> list[torch.device]:
    """Return the devices that this process computes on beside its own: all other GPUs with DataParallel."""
    if config.strategy != "dataparallel":
        return []
    every = (torch.device("cuda", i) for i in range(torch.cuda.device_count()))
    return [device for device in every if device != world.device]


def local_machine(world: World) -> dict[str, Any]:
    """Return what Lightning asks about the processes that are running already: device, and how many on how many machines."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
    return {"accelerator": world.device.type, "devices": local_size, "num_nodes": world.world_size // local_size}


def distribute(module: nn.Module, config: VisionConfig, world: World) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    """Return the model that computes forward under the run's strategy, and the function that computes backward of a loss.

    Lightning's Trainer wraps the model itself. The process group of a strategy that needs one is running already.
    """
    strategy = strategy_of(config, world)
    if strategy == "ddp":
        from gptscale.recipes import ddp

        return ddp.shard(module), Tensor.backward
    if strategy == "fabric":
        from gptscale.recipes import fabric

        options = fabric.LightningFabricConfig()
        launched = fabric.shard(options, nn.Module, world.world_size, **local_machine(world))
        return launched.setup_module(module), launched.backward
    return (nn.DataParallel(module) if strategy == "dataparallel" else module), Tensor.backward
