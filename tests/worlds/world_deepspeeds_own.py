"""Run as ranks: three steps of a ZeRO recipe, then DeepSpeed's own save_checkpoint into OUT/own.

usage: world_deepspeeds_own.py RECIPE OUT [option...]
"""

import os
import sys
from pathlib import Path

from world_engine import engine_and_batches, planned

if __name__ == "__main__":
    recipe, out, options = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    with planned(recipe, out, "--steps", "6", *options) as plan:
        engine, batches = engine_and_batches(plan)
        for step in range(3):
            engine.train_step(batches.batch(step), plan.run.lr_at(step))
        engine.optimizer.ds.save_checkpoint(str(out / "own"))
    os._exit(0)
