"""Before Colossal-AI is used: its noise off, its view of our process groups right, and the CPU adapter where there is no GPU."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from gptscale.common.process.world import World


def start(world: World) -> None:
    """Import Colossal-AI and make it fit this process; call it once, before anything else of it is used."""
    warnings.filterwarnings("ignore", module=r"(colossalai|bitsandbytes|diffusers|transformers|torch)\.")
    for name in ("bitsandbytes", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from colossalai.logging import get_dist_logger
    from colossalai.pipeline import p2p

    get_dist_logger().set_level("ERROR")

    p2p._check_for_nccl_hccl_backend = is_nccl
    # Its groups (cluster/process_group_mesh.py) are made with torch's default of half an hour.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timedelta(seconds=world.timeout_s)
    if world.device.type == "cpu":
        from gptscale.common.engines.colossal import cpu as colossal_cpu

        colossal_cpu.adapt()


def is_nccl(group: Any) -> bool:
    """Whether `group` moves GPU tensors over NCCL.

    In place of colossalai/pipeline/p2p.py, _check_for_nccl_hccl_backend: it compares the group's name with "nccl" and then
    with Backend.HCCL, which torch has only on Huawei's devices; ours is called "cpu:gloo,cuda:nccl", or "gloo".
    """
    import torch.distributed as dist

    group = group or dist.group.WORLD
    return "nccl" in group.name()
