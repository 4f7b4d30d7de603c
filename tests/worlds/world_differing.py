"""A rank of a run, started with words of its own: those behind `--rank N` are for rank N alone."""

import os
import sys
from itertools import takewhile

from gptscale.launchers.run.worker import run_recipe
from gptscale.lenet.run.worker import worker

what, *words = sys.argv[1:]
common = list(takewhile(lambda word: word != "--rank", words))
rank, *own = words[len(common) + 1 :]
words = common + (own if os.environ["RANK"] == rank else [])
if what == "lenet":
    os._exit(worker(words))
run_recipe(what, words)
