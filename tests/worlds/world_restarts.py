"""Die by SIGKILL on rank 1 in the middle of a collective, in every start but the last.

usage: world_restarts.py LAST FILE
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from gptscale.common.process.world import World, process_group

last, file = int(sys.argv[1]), Path(sys.argv[2])
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
world = World.from_environment("cpu", 20.0)
with process_group(world):
    if start < last and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world.world_size
    if world.is_main:
        with file.open("a") as lines:
            lines.write(f"{start}\n")
# The threads of torch can abort the interpreter's own teardown.
os._exit(0)
