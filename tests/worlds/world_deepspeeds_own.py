"""Run as ranks: three steps of a ZeRO recipe, then DeepSpeed's own save_checkpoint into OUT/own.

usage: world_deepspeeds_own.py RECIPE OUT
"""

import os
import sys
from pathlib import Path

import torch

from gptscale.common.process.world import World, process_group
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get

if __name__ == "__main__":
    torch.set_num_threads(1)
    recipe, out = sys.argv[1], Path(sys.argv[2])
    config, recipe_config = parse_run(recipe, ["--data", "synthetic", "--steps", "6", "--out", str(out)])
    plan = preflight(recipe, config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
    with process_group(plan.run.world):
        engine = get(recipe).load().build(plan.run, recipe_config)
        batches = plan.batches(plan.train, engine.data_rank, engine.data_size)
        for step in range(3):
            engine.train_step(batches.batch(step), plan.run.lr_at(step))
        engine.optimizer.ds.save_checkpoint(str(out / "own"))
    os._exit(0)
