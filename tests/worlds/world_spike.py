"""Run as ranks: the worker of a run, in which the loss of step 40, and of that step only, is four times what it should be.

usage: world_spike.py RECIPE [options of the run]
"""

import sys

from gptscale.common.model import loss as loss_module
from gptscale.common.process.progress import progress
from gptscale.launchers.run.worker import run_recipe

healthy = loss_module.linear_cross_entropy


def spiking(*arguments):
    loss = healthy(*arguments)
    return loss * 4 if progress.step == 40 else loss


if __name__ == "__main__":
    loss_module.linear_cross_entropy = spiking
    run_recipe(sys.argv[1], sys.argv[2:])
