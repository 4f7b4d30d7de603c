"""Run as ranks: the worker of a run, of which one rank is killed when it calls a function.

usage: world_killed_in.py MODULE FUNCTION RANK RECIPE|lenet [options of the run]
"""

import functools
import importlib
import os
import signal
import sys

from gptscale.launchers.run.worker import run_recipe
from gptscale.lenet.run.worker import worker

module, function, rank, what, *words = sys.argv[1:]
if os.environ["RANK"] == rank:
    *owners, name = function.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    setattr(owner, name, lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL))
if what == "lenet":
    os._exit(worker(words))
run_recipe(what, words)
