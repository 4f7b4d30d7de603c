"""Run as ranks, in Colossal-AI's environment: load a checkpoint, save it again, and find out what no run shows.

usage: world_colossal.py RECIPE OUT CHECKPOINT OPTION...
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from world_engine import end_well, engine_and_batches, planned

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save


def moved(engine, reader):
    """Names of the boxes that are not as the checkpoint has them."""
    return [
        s.name
        for s in engine.state()
        if not torch.equal(reader.read(s.name, s.offset, tuple(s.tensor.shape)), s.tensor.cpu())
    ]


def masks(engine, step):
    """What attention drops here at the beginning of a step, and what the rest of a block drops."""
    engine.streams.start(step, engine.data_rank)
    rest = F.dropout(torch.ones(256), 0.5)
    dropout = engine.streams.dropouts[0] if engine.streams.dropouts else None
    return (dropout(torch.ones(256)) if dropout else rest).tolist(), rest.tolist()


def main(recipe: str, out: Path, checkpoint: Path, options: list[str]) -> None:
    # With seed 99 these are not the weights that were saved.
    with planned(recipe, out, "--dropout", "0.1", "--seed", "99", *options) as plan:
        found: dict[str, object] = {"tp": plan.run.config.tp_size, "pp": plan.run.config.pp_size}
        engine, batches = engine_and_batches(plan)
        found["bytes"] = sum(s.tensor.nbytes for s in engine.state())
        found["parameters"] = sum(s.tensor.numel() for s in engine.state() if s.name.startswith("model/"))
        reader = Reader(checkpoint)
        found["moved by building"] = len(moved(engine, reader))
        reader.load_into(engine)
        assert engine.counters() == reader.manifest["counters"]
        save(engine, out / "again", reader.step, {"workload": {}})

        found["attention"], found["rest"] = masks(engine, 3)
        assert (found["attention"], found["rest"]) == masks(engine, 3)
        assert found["rest"] != masks(engine, 4)[1]

        from gptscale.common.engines.colossal import gpt2 as colossal_gpt2

        batch = batches.batch(0)
        found["eval"] = engine.eval_loss(batch).item()
        healthy = colossal_gpt2.cross_entropy
        colossal_gpt2.cross_entropy = lambda *arguments: healthy(*arguments) * float("nan")
        sick = engine.train_step(batch, 1e-3)
        assert not torch.isfinite(sick.loss)
        colossal_gpt2.cross_entropy = healthy
        # This healthy step comes too late: after a sick step nothing may move.
        assert torch.isfinite(engine.train_step(batch, 1e-3).loss)
        found["moved by sick steps"] = moved(engine, reader)
        found["bubble"] = engine.bubble().theory if engine.bubble() else None
        folder = out / f"rank{dist.get_rank()}"
        folder.mkdir(parents=True)
        (folder / "found.json").write_text(json.dumps(found))
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    end_well()
