"""Run as ranks: the worker of a run, in which after step 3 a bit of a weight flips on rank 1.

usage: world_flip.py WEIGHT RECIPE [options of the run]
"""

import os
import sys

import torch

from gptscale.common.optim.fused import FusedOptimizer
from gptscale.launchers.run.worker import run_recipe

NAME = sys.argv[1]
step = FusedOptimizer.step
steps = 0


def flipping(self, lr, loss):
    global steps
    norm = step(self, lr, loss)
    steps += 1
    if steps == 3:
        (weight,) = [shard.tensor for shard in self.state() if shard.name == NAME]
        weight.view(torch.int32).view(-1)[5] ^= 1 << 3
    return norm


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        FusedOptimizer.step = flipping
    run_recipe(sys.argv[2], sys.argv[3:])
