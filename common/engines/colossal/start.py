"""The start of Colossal-AI: quiet, with the right view of the run's process groups, and able to run on a CPU."""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gptscale.common.process.world import World


def start(world: World) -> None:
    """Import Colossal-AI and make it fit this process, once, before anything else of it is used."""
    importlib.import_module("gptscale.common.engines.colossal.library")
    from colossalai.device.device_mesh import DeviceMesh
    from colossalai.logging import get_dist_logger
    from colossalai.pipeline import p2p

    get_dist_logger().set_level("ERROR")

    p2p._check_for_nccl_hccl_backend = is_nccl
    if world.device.type == "cuda":
        # It looks a group's device up by its backend, which it takes to be "nccl". Here a group has one for the CPU too.
        DeviceMesh._DIST_BACKEND["cuda"] = dist.get_backend()
    # It makes its groups (cluster/process_group_mesh.py) with torch's default timeout, half an hour.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=world.timeout_s)
    if world.device.type == "cpu":
        adapt_to_cpu()


def is_nccl(group: Any) -> bool:
    """Return whether `group` moves GPU tensors over NCCL.

    It replaces _check_for_nccl_hccl_backend of colossalai/pipeline/p2p.py. That compares the group's name with "nccl", and
    then with Backend.HCCL, which torch has only on Huawei's devices. Groups here are named "cpu:gloo,cuda:nccl" or "gloo".
    """
    group = group or dist.group.WORLD
    return "nccl" in group.name()


def adapt_to_cpu() -> None:
    """Give Colossal-AI 0.5.0 what it lacks on a machine without a GPU.

    Its CPU accelerator gets the calls for which it raises RuntimeError, and torch.cuda.set_device accepts a CPU. Tensor and
    pipeline parallelism then run on the CPU with gloo. LowLevelZero and Gemini ask for a GPU in many more places, so they do
    not run there. A comment names the caller of each entry, with a path below `colossalai/`.
    """
    from colossalai.accelerator import set_accelerator
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    class Cpu(CpuAccelerator):  # type: ignore[misc]
        """Colossal-AI's CPU accelerator, with the calls that training makes."""

        def manual_seed(self, seed: int) -> None:
            # Caller: shardformer/layer/utils.py, Randomizer.__init__. Every parallel layer makes one.
            torch.manual_seed(seed)

        def get_rng_state(self, device: Any = None) -> torch.Tensor:
            # The same caller. Upstream passes `device` on to torch.get_rng_state, which takes none.
            return torch.get_rng_state()

        def synchronize(self, device: Any = None) -> None:
            """Do nothing, because a CPU has nothing to wait for."""
            # Callers: utils/common.py and the profilers.

        def set_device(self, device: Any = None) -> None:
            """Do nothing, because there is one CPU."""
            # Callers: initialize.py and the plugins.

    set_accelerator(Cpu())
    # Caller: shardformer/modeling/gpt2.py, gpt2_model_forward, with `hidden_states.device` before every block.
    set_cuda_device = torch.cuda.set_device

    def set_device(device: Any) -> None:
        if torch.device(device).type == "cuda":
            set_cuda_device(device)

    torch.cuda.set_device = set_device
