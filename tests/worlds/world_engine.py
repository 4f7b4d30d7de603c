"""How scripts of ranks begin and end: the run that their words mean, its engine in their world, and a way out."""

import os
import sys
from contextlib import contextmanager, nullcontext

import torch
from torch.distributed import is_initialized

from gptscale.common.process.world import World, process_group
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get


@contextmanager
def planned(recipe, out, *words):
    """Yield the plan of a run on random ids, while the ranks are joined, which an outer call may have done."""
    torch.set_num_threads(1)
    config, recipe_config = parse_run(recipe, ["--data", "synthetic", "--out", str(out), *words])
    plan = preflight(recipe, config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
    with nullcontext() if is_initialized() or not get(recipe).axes else process_group(plan.run.world):
        yield plan


def engine_and_batches(plan):
    """Return the engine of a plan, and the batches of this rank."""
    engine = get(plan.run.recipe).load().build(plan.run, plan.recipe_config)
    return engine, plan.batches(plan.train, engine.data_rank, engine.data_size)


def end_well():
    """End this rank at once, because a library's threads may hang in the interpreter's teardown."""
    sys.stdout.flush()
    os._exit(0)
