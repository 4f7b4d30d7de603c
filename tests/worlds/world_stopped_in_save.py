"""Run as ranks: SIGTERM comes while rank 0 writes behind the steps, and the disk waits until the run waits for the save.

usage: world_stopped_in_save.py RECIPE OPTIONS, with --save-async among them
"""

import os
import signal
import sys
import threading

from gptscale.common.checkpoint.background import BackgroundSave
from gptscale.launchers.run.worker import run_recipe

fsync, finish, waits = os.fsync, BackgroundSave.finish, threading.Event()


def slow_fsync(descriptor):
    if threading.current_thread().name == "gptscale-save" and os.environ["RANK"] == "0" and not waits.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        assert waits.wait(100)
    fsync(descriptor)


def told_finish(self):
    waits.set()
    finish(self)


os.fsync, BackgroundSave.finish = slow_fsync, told_finish
run_recipe(sys.argv[1], sys.argv[2:])
