"""Run as ranks: in each case rank 1 has a NaN from the third step on, and every rank must stop with its weights unmoved.

usage: world_nan.py OUT loss,RECIPE|gradient,RECIPE...; what is sick: the loss (NaN), or only its gradient (Inf)
"""

import sys
from pathlib import Path

import torch
from world_engine import end_well, engine_and_batches, planned

from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.writer import save
from gptscale.common.data.loader import Prefetcher
from gptscale.common.engines import tensor_parallel
from gptscale.common.errors import NumericError
from gptscale.common.model import loss as loss_module
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.common.train import train
from gptscale.results.record.recorder import Recorder

SICK_STEP = 2
# A window of 4 steps: the host finds out one step late, and the weights must not have moved all the same.
WORDS = "--steps 8 --log-every 4 --n-layer 2 --seq-len 16".split()
healthy = loss_module.linear_cross_entropy


class InfiniteGradient(torch.autograd.Function):
    """The identity, with a gradient that is Inf."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def carry_out(what: str, recipe: str, out: Path) -> None:
    out.mkdir(exist_ok=True)
    with planned(recipe, out, *WORDS) as plan:
        engine, batches = engine_and_batches(plan)
        world, step = plan.run.world, {"now": 0}

        def sick(*arguments):
            loss = healthy(*arguments)
            if step["now"] < SICK_STEP or world.rank != 1:
                return loss
            return loss * float("nan") if what == "loss" else InfiniteGradient.apply(loss)

        loss_module.linear_cross_entropy = tensor_parallel.linear_cross_entropy = sick

        def lr_at(now):
            if now == SICK_STEP:
                save(engine, out, now, {"workload": {}})
            step["now"] = now
            return 1e-3

        folder = out / f"rank{world.rank}"
        folder.mkdir(parents=True)
        try:
            with (
                Recorder(plan.run, folder, sequences=batches.sequences) as recorder,
                Prefetcher(batches, world.device) as data,
            ):
                train(engine, data, recorder, lr_at=lr_at, start=0, steps=8)
        except NumericError as error:
            (folder / "error").write_text(str(error))
        before = Reader(out / f"step-{SICK_STEP}")
        moved = [
            s.name
            for s in engine.state()
            if s.tensor.numel() and not torch.equal(before.read(s.name, s.offset, tuple(s.tensor.shape)), s.tensor)
        ]
        # The swap files go with the first to close, and another could still need them.
        gather_objects(None)
        engine.close()
        (folder / "moved").write_text(" ".join(moved))
        (folder / "expected").write_text(str(list(batches.sequences(SICK_STEP, 1))))


def main(out: Path, cases: list[str]) -> None:
    with process_group(World.from_environment("auto")):
        for case in cases:
            carry_out(*case.split(","), out / case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end_well()
