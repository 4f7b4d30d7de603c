"""Run as ranks: many ways of splitting in one world, each held against one process's losses, norms and final weights.

usage: world_split.py OUT {OPTIMIZER: STEPS}; writes OUT/rank<N>.json: {way: {figure: largest deviation}}
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from world_engine import end_well, engine_and_batches

from gptscale.common.model import gpt as model
from gptscale.common.process.world import World, process_group
from gptscale.launchers.run.options import default_recipe_config, parse_run
from gptscale.launchers.run.preflight import preflight

LR = {"adamw": 1e-3, "sgd": 0.1}


def engine_of(recipe, words, world):
    return engine_and_batches(preflight(recipe, *parse_run(recipe, words), world))


def n_layers(recipe, way, n):
    """Return how many blocks a way of splitting has: two for each stage, and without stages 4 on 2 ranks or 2 on 4.

    On two ranks four blocks show the drift over layers, so that four ranks need fewer.
    """
    if recipe == "pipeline":
        return 2 * n
    return 4 if "--pp-size" in way else 8 // n


def trained(recipe, words, optimizer, n_steps, world):
    """Losses and norms of every step, the loss on another batch before the fourth, and the boxes of the final weights."""
    engine, batches = engine_of(recipe, [*words, "--optimizer", optimizer], world)
    steps = []
    for i in range(n_steps):
        if i == 3:
            held_out = engine.eval_loss(batches.batch(99)).item()
        steps.append(engine.train_step(batches.batch(i), LR[optimizer]))
    boxes = [shard._replace(tensor=shard.tensor.clone()) for shard in engine.state() if shard.name.startswith("model/")]
    return [s.loss.item() for s in steps], [s.grad_norm.item() for s in steps], held_out, boxes


def of_one_process(words, n_steps, alone, world):
    """What `trained` returns for each optimizer, computed by rank 0 and sent to the others."""
    result = [None]
    if world.is_main:
        result = [{optimizer: trained("single", words, optimizer, n, alone) for optimizer, n in n_steps.items()}]
    dist.broadcast_object_list(result)
    return result[0]


def relative(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def masks(recipe, words, world):
    """The first dropout mask of three steps, the last with the first one's number, as bytes."""
    engine, batches = engine_of(recipe, [*words, "--dropout", "0.5"], world)
    plain, found = model.F.dropout, []

    def spy(x, p, training):
        y = plain(x, p, training)
        found.append((y == 0).flatten()[:4096].to(torch.uint8).numpy().tobytes())
        return y

    firsts = []
    for step in (0, 1, 0):
        found.clear()
        model.F.dropout = spy
        engine.train_step(batches.batch(step), 0.0)
        model.F.dropout = plain
        firsts.append(found[0])
    return firsts


def main(out, n_steps):
    torch.set_num_threads(1)
    world = World.from_environment("auto")
    n = world.world_size
    batch = ["--global-batch-size", str(4 * n), "--data", "synthetic", "--seq-len", "32", "--out", str(out)]
    alone = dataclasses.replace(world, rank=0, world_size=1)
    found = {}
    with process_group(world):
        references = {}
        for recipe in ("tensor_parallel", "context_parallel", "pipeline", "hybrid_3d"):
            for way in default_recipe_config(recipe).ways(n):
                n_layer = n_layers(recipe, way, n)
                common = [*batch, "--n-layer", str(n_layer)]
                if n_layer not in references:
                    words = [*common, "--grad-accum-steps", "2"]
                    references[n_layer] = of_one_process(words, n_steps, alone, world)
                ours = references[n_layer]
                # Clipping was at work.
                assert max(ours["adamw"][1]) > 1
                split = {}
                staged = recipe == "pipeline" or "--pp-size" in way
                words = [*common, *way, *([] if staged else ["--grad-accum-steps", "2"])]
                for optimizer, (losses, norms, held_out, boxes) in ours.items():
                    loss, norm, evaluated, parts = trained(recipe, words, optimizer, n_steps[optimizer], world)
                    split[f"loss {optimizer}"] = relative(loss, losses)
                    split[f"grad_norm {optimizer}"] = relative(norm, norms)
                    split[f"eval {optimizer}"] = relative([evaluated], [held_out])
                    whole = {shard.name: shard.tensor for shard in boxes}
                    if optimizer == "sgd":
                        split["weights"] = max(
                            float((p.tensor - whole[p.name][p.box]).abs().max() / whole[p.name].abs().max())
                            for p in parts
                        )
                found[" ".join([recipe, *way])] = split
        mesh = ["--tp-size", "2"] if n > 2 else []
        first, second, again = masks("hybrid_3d" if n > 2 else "tensor_parallel", [*batch, *mesh], world)
        assert first == again != second
        everybodys = [None] * n
        dist.all_gather_object(everybodys, first)
        # No two ranks drop alike: they hold different sequences, or parts of one.
        assert len(set(everybodys)) == n
    (out / f"rank{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    end_well()
