"""Run as ranks: how much the resident set grows, at its highest, while a recipe builds its engine.

usage: world_rss.py RECIPE OUT [option...]; writes OUT/rank<N>.json: {"grown": bytes, "n": parameters}
"""

import json
import os
import resource
import sys
from pathlib import Path

import torch

from gptscale.common.process.world import World, process_group
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(recipe, out, options):
    torch.set_num_threads(1)
    plan = preflight(recipe, *parse_run(recipe, ["--out", str(out), *options]), World.from_environment("auto"))
    with process_group(plan.run.world):
        small = preflight(recipe, *parse_run(recipe, ["--out", str(out), "--data", "synthetic"]), plan.run.world)
        # This makes the imports and first allocations, which are not the model's.
        get(recipe).load().build(small.run, small.recipe_config)
        before = peak()
        engine = get(recipe).load().build(plan.run, plan.recipe_config)
        held = sum(shard.tensor.nbytes for shard in engine.state())
        found = {"grown": peak() - before, "before": before, "held": held, "n": plan.run.gpt.n_params_in_memory}
    (out / f"rank{plan.run.world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(0)
