"""Fork one process for each simulation under the mock of CUDA, so that torch and engines are imported once.

It reads a line for each (what, folder, environment, words) and answers with the exit status. The output is in the folder's `log`.
What is "simulate", or "run", which is all that a worker does in a run: its record, evaluation, checkpoints, and resume. The row
is refused at its end.
"""

import ctypes
import json
import os
import sys
import traceback
from contextlib import nullcontext

import mock_engines  # noqa: F401
import torch
from triton.compiler import compiler
from triton.runtime import cache

from gptscale.common.checkpoint import reader
from gptscale.common.model import initial_weights
from gptscale.common.process.begin import begin_process
from gptscale.common.process.heartbeat import Heartbeat
from gptscale.common.process.mock import simulating
from gptscale.common.process.world import World
from gptscale.foresight.mock_cuda import boot, watch
from gptscale.foresight.mock_cuda.host import begin_lone_group, know_what_peers_send, leave_out
from gptscale.foresight.simulate import recipe_program
from gptscale.launchers.run import worker
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get


def run(recipe, *words):
    begin_process()
    init_rows, init_tensor = initial_weights.init_rows, initial_weights.init_tensor
    boot.answer_for_peers()
    ctypes.CDLL(None).mock_share_host_memory()
    leave_out()
    # A checkpoint is refused where it holds a NaN, as memory that nobody wrote may.
    initial_weights.init_rows, initial_weights.init_tensor = init_rows, init_tensor
    with simulating():
        config, recipe_config = parse_run(recipe, words)
        plan = preflight(recipe, config, recipe_config, World.from_environment("cuda", config.dist_timeout_s))
        gather = reader.gather_objects

        def gather_with_peers(value):
            # Peers load the other parts of a checkpoint.
            if isinstance(value, tuple) and isinstance(value[0], set):
                return [(value[0] | {*reader.Reader(plan.resume).shapes}, value[1])]
            return gather(value)

        reader.gather_objects = gather_with_peers
        train_with = worker._train_with

        def train_beside_peers(engine, *rest):
            if hasattr(engine, "plugin"):
                know_what_peers_send(plan.run, engine)
            return train_with(engine, *rest)

        worker._train_with = train_beside_peers
        worker.process_group = lambda world, facts: nullcontext(get(recipe).axes and begin_lone_group(world))
        worker.Heartbeat.of_world = lambda rank, world_size: Heartbeat(rank, world_size, None)
        return worker.work(plan)


def simulate(folder, *words):
    task = {"folder": folder, "steps": 2, "share": True, "ends": False, "inbox": folder}
    task |= {"balanced_experts": False}
    os.environ[boot.TASK] = json.dumps(task)
    boot.begin(torch)
    watch.begin(torch)
    if "deepspeed.runtime.engine" in sys.modules:
        watch.watch_deepspeed(sys.modules["deepspeed.runtime.engine"])
    try:
        recipe_program.main(list(words))
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


# To know its version Triton reads all of itself. It keeps the answer.
getattr(cache, "triton_key", getattr(compiler, "triton_key", None))()

for line in sys.stdin:
    what, folder, environment, words = json.loads(line)
    if not (pid := os.fork()):
        os.environ.update(environment)
        log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            status = simulate(folder, *words) if what == "simulate" else run(*words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
