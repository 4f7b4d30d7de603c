"""Import all engines of this environment under the mock of CUDA, so that the processes forked then need not import them.

Some engines count the devices, or ask for their age, when they are imported. If CUDA were asked, torch would refuse it in a
fork, which the mock survives. So the answers come from the variables of the mock.
"""

import os
from unittest.mock import patch

import torch

from gptscale.common.process import environments
from gptscale.common.process.fork_server import import_without_collection
from gptscale.recipes import RECIPES

# Imports of the first step of any simulation.
AT_THE_FIRST_STEP = ("tyro._cli", "typeguard", "torch._dynamo", "torch.distributed.pipelining")


def engines():
    """Return the engines' modules, without the worker and the recipe, which are imported behind `leave_out`."""
    if environments.is_inside("colossalai"):
        # These it imports. It asks at its own import for the current device, which is another one in each rank.
        return ["peft", "bitsandbytes"]
    names = [name for row in RECIPES.values() if not row.environment for name in row.engine_imports]
    # DeepSpeed imports the first where an engine of stage 1 or 2 is made, and --compile the second.
    return [*names, "deepspeed.compile.backend", "torch._inductor.compile_fx"]


DEVICES = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
CAPABILITY = tuple(int(os.environ[f"GPTSCALE_MOCK_{name}"]) for name in ("MAJOR", "MINOR"))
with (
    patch.object(torch._C, "_cuda_getDeviceCount", lambda: DEVICES),
    patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
):
    import_without_collection(dict.fromkeys([*AT_THE_FIRST_STEP, *engines()]))
