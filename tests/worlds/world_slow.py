"""Run as ranks: the worker of a run, in which rank 1 sleeps in each block's forward.

usage: world_slow.py RECIPE [options of the run]
"""

import os
import sys
import time

from gptscale.common.model import gpt
from gptscale.launchers.run.worker import run_recipe

healthy = gpt.Block.forward


def sleepy(self, *arguments, **options):
    time.sleep(0.1)
    return healthy(self, *arguments, **options)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        gpt.Block.forward = sleepy
    run_recipe(sys.argv[1], sys.argv[2:])
