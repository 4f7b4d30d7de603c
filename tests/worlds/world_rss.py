"""Run as ranks: how much the resident set grows, at its highest, while a recipe builds its engine.

usage: world_rss.py RECIPE OUT [option...]; writes OUT/rank<N>.json: {"grown": bytes, "n": parameters}
"""

import json
import resource
import sys
from pathlib import Path

from world_engine import end_well, engine_and_batches, planned


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(recipe, out, options):
    with planned(recipe, out, *options) as plan, planned(recipe, out) as small:
        # This makes the imports and first allocations, which are not the model's.
        engine_and_batches(small)
        before = peak()
        engine, _ = engine_and_batches(plan)
        held = sum(shard.tensor.nbytes for shard in engine.state())
        found = {"grown": peak() - before, "before": before, "held": held, "n": plan.run.gpt.n_params_in_memory}
    (out / f"rank{plan.run.world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    end_well()
