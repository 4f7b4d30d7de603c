"""Load each checkpoint into this recipe at this world size, and save it again without a step between.

usage: world_reload.py RECIPE OUT CHECKPOINT... [option...]
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save
from gptscale.common.process.world import World, process_group
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get


def main(recipe: str, out: Path, checkpoints: list[Path], options: list[str]) -> None:
    torch.set_num_threads(1)
    words = ["--data", "synthetic", "--dropout", "0.1", "--seed", "99", "--out", str(out), *options]
    config, recipe_config = parse_run(recipe, words)
    plan = preflight(recipe, config, recipe_config, World.from_environment(config.device, config.dist_timeout_s))
    with process_group(plan.run.world) if get(recipe).axes else nullcontext():
        # With seed 99 these are not the weights that were saved.
        engine = get(recipe).load().build(plan.run, recipe_config)
        for checkpoint in checkpoints:
            reader = Reader(checkpoint)
            reader.load_into(engine)
            assert engine.counters() == reader.manifest["counters"]
            save(engine, out / checkpoint.parents[1].name, reader.step, {"workload": {}})
        engine.close()


if __name__ == "__main__":
    words = sys.argv[3:]
    split = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    main(sys.argv[1], Path(sys.argv[2]), [Path(p) for p in words[:split]], words[split:])
    sys.stdout.flush()
    os._exit(0)
