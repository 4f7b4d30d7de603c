"""Run as ranks: the worker of a run, whose rank 1 is killed where a part of its step 5 begins.

usage: world_killed_at.py PART RECIPE [options of the run]; PART: forward, backward, optimizer or saving
"""

import os
import signal
import sys

from gptscale.common.process.progress import Progress
from gptscale.launchers.run.worker import run_recipe

PART = sys.argv[1]
at = Progress.at


def killed(self, part, micro_batch=-1):
    at(self, part, micro_batch)
    if part == PART and self.step >= 5:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        Progress.at = killed
    run_recipe(sys.argv[2], sys.argv[3:])
