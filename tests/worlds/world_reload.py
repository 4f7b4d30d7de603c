"""Load each checkpoint into this recipe at this world size, and save it again without a step between.

usage: world_reload.py RECIPE OUT CHECKPOINT... [option...]
"""

import sys
from pathlib import Path

from world_engine import end_well, engine_and_batches, planned

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save


def main(recipe: str, out: Path, checkpoints: list[Path], options: list[str]) -> None:
    # With seed 99 these are not the weights that were saved.
    with planned(recipe, out, "--dropout", "0.1", "--seed", "99", *options) as plan:
        engine, _ = engine_and_batches(plan)
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
    end_well()
