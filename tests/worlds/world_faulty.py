"""Run as ranks: the worker of a run, with one of the faults below.

usage: world_faulty.py FAULT[,ARGUMENT...] RECIPE|lenet [options of the run]
"""

import functools
import importlib
import os
import signal
import subprocess
import sys
import threading
import time

import torch

from gptscale.common.checkpoint.background import BackgroundSave
from gptscale.common.data.loader import Batches
from gptscale.common.model import gpt
from gptscale.common.model import loss as loss_module
from gptscale.common.process.progress import Progress, progress
from gptscale.launchers.run.checkpoints import Saver
from gptscale.launchers.run.worker import run_recipe

FAULT, RECIPE, *WORDS = sys.argv[1:]
RANK = os.environ["RANK"]


def killed(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, act):
    """Let `act` be called with the arguments of a function before the function itself."""
    healthy = getattr(owner, name)

    @functools.wraps(healthy)
    def acting(*arguments, **options):
        act(*arguments)
        return healthy(*arguments, **options)

    setattr(owner, name, acting)


def none():
    """Leave the run as it is."""


def own(rank, *words):
    """Start one rank with words of its own behind the others'."""
    if rank == RANK:
        WORDS.extend(words)


def killed_in(module, function, rank):
    """Kill one rank when it calls a function."""
    if rank == RANK:
        *owners, name = function.split(".")
        setattr(functools.reduce(getattr, owners, importlib.import_module(module)), name, killed)


def killed_at(part, rank="1", step="5"):
    """Kill a rank where a part of a step begins: forward, backward, optimizer or saving."""
    if rank == RANK:
        before(Progress, "at", lambda self, now, *_: killed() if now == part and self.step >= int(step) else None)


def flipped(name):
    """Flip a bit of a weight on rank 1 after step 3."""

    def flip(self, step, last):
        if step == 3:
            (weight,) = [shard.tensor for shard in self.engine.state() if shard.name == name]
            weight.detach().view(torch.int32).view(-1)[5] ^= 1 << 3

    if RANK == "1":
        before(Saver, "__call__", flip)


def slow():
    """Let rank 1 sleep in each block's forward."""
    if RANK == "1":
        before(gpt.Block, "forward", lambda *_: time.sleep(1))


def stopped():
    """Stop rank 1 for 8 s in its own work, in the steps 24 and 40, which are compared with the other rank's apart."""
    code = "until grep -q 'T (stopped)' /proc/$0/status; do sleep 0.1; done; sleep 8; kill -CONT $0"

    def stop(self, part, *_):
        if part == "data" and self.step in (24, 40):
            subprocess.Popen(["sh", "-c", code, str(os.getpid())])
            os.kill(os.getpid(), signal.SIGSTOP)

    if RANK == "1":
        before(Progress, "at", stop)


def slow_reader():
    """Let every rank read each batch half a second later than it could."""
    before(Batches, "batch", lambda *_: time.sleep(0.5))


def spike():
    """Multiply the loss of step 40, and of that step only, by four."""
    healthy = loss_module.linear_cross_entropy
    loss_module.linear_cross_entropy = lambda *x: healthy(*x) * (4 if progress.step == 40 else 1)


def stopped_in_save():
    """Send SIGTERM while rank 0 writes behind the steps, and let the disk wait until the run waits for the save."""
    waits = threading.Event()

    def wait(descriptor):
        if threading.current_thread().name == "gptscale-save" and RANK == "0" and not waits.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            assert waits.wait(100)

    before(os, "fsync", wait)
    before(BackgroundSave, "finish", lambda self: waits.set())


if __name__ == "__main__":
    name, *arguments = FAULT.split(",")
    globals()[name](*arguments)
    if RECIPE == "lenet":
        from gptscale.lenet.run.worker import worker

        os._exit(worker(WORDS))
    run_recipe(RECIPE, WORDS)
