"""Ranks of a run that read each batch half a second later than they could."""

import sys
import time

from gptscale.common.data.loader import Batches
from gptscale.launchers.run.worker import run_recipe

READ_S = 0.5
read = Batches.batch


def read_slowly(self, *arguments):
    time.sleep(READ_S)
    return read(self, *arguments)


if __name__ == "__main__":
    Batches.batch = read_slowly
    run_recipe(sys.argv[1], sys.argv[2:])
