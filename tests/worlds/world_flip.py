"""Run as ranks: the worker of a run, in which after step 3 a bit of a weight flips on rank 1, or of none.

usage: world_flip.py WEIGHT|none RECIPE [options of the run]
"""

import os
import sys

import torch

from gptscale.launchers.run.checkpoints import Saver
from gptscale.launchers.run.worker import run_recipe

NAME = sys.argv[1]
save = Saver.__call__


def flipping(self, step, last):
    if step == 3 and NAME != "none":
        (weight,) = [shard.tensor for shard in self.engine.state() if shard.name == NAME]
        weight.detach().view(torch.int32).view(-1)[5] ^= 1 << 3
    save(self, step, last)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        Saver.__call__ = flipping
    run_recipe(sys.argv[2], sys.argv[3:])
