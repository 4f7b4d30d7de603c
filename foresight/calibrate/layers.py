"""Time the layers of a GPT as a recipe holds them: forward, backward and optimizer of a block, and of what is not a block.

A block is what three blocks take longer than one, halved. The model is built by the recipe itself, and its passes are those of
its engine, so that what a wrapper or a library adds to a layer (hooks, copies, gathers that nothing overlaps) is in the
layer's time. No model of these depths says anything of another depth, another number of micro-batches or another schedule.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gptscale.common.data.loader import to_device
from gptscale.common.engine import Batch
from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.measure.speed import synchronize
from gptscale.common.model.activation_checkpointing import apply_activation_checkpointing
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.precision import autocast
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.calibrate.cut import cut_gpt
from gptscale.foresight.calibrate.timing import WARM_UP, Timing, meet, summary
from gptscale.recipes import get

# Blocks of the two models.
FEW, MORE = 1, 3
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
# The host's time to start a forward, where the device works behind it.
STARTING = "starting"
# A backward behind which gradients are not exchanged, because more micro-batches follow.
ACCUMULATION = "accumulation"
WHOLE = "single"
# The spread of what drowns in noise.
UNKNOWN = 2.0


class LayerTimes(NamedTuple):
    """Seconds of a block and of the rest of the model (tables, last norm, head), by phase."""

    block: Mapping[str, Timing]
    rest: Mapping[str, Timing]


def run_of(recipe: str, config: RunConfig, world: World) -> Run:
    """Return a run of `recipe` on `world`, whose micro-batch is the whole step.

    The tensor ranks of `single`, if its config has any, are not there.
    """
    axes = get(recipe).axes
    size = world.world_size
    tp, pp = (size if axes[:1] == (axis,) else 1 for axis in ("tp", "pp"))
    tp = config.tp_size or 1 if recipe == WHOLE else tp
    dp = size // (tp * pp) if axes else 1
    config = dataclasses.replace(config, tp_size=tp, pp_size=pp)
    return Run(recipe, config, config.gpt(), plan_batch(dp, None, config.micro_batch_size, 1), world)


def engine_of(run: Run) -> TorchEngine:
    """Build the engine of a run with the recipe's own options."""
    if run.recipe == WHOLE:
        device, tp = run.world.device, run.tp_size
        model = cut_gpt(run.gpt, tp, device) if tp > 1 else materialise(meta_gpt(run), run, device)
        if tp > 1:
            apply_activation_checkpointing(model.blocks, run.config.activation_checkpointing)
        return TorchEngine(run, model, FusedOptimizer(dict(model.named_parameters()), run.config))
    row = get(run.recipe)
    module = row.load()
    engine: TorchEngine = module.build(run, getattr(module, row.config)(**row.preset))
    return engine


def batch_of(run: Run) -> Batch:
    """Return a batch of random tokens, one micro-batch."""
    rows = torch.randint(0, run.gpt.vocab_size, (run.batch.micro_batch_size, run.seq_len + 1))
    return to_device(Batch(0, rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), run.world.device)


def phase_seconds(engine: TorchEngine, batch: Batch, micro_batches: int = 1) -> dict[str, float]:
    """Take one step as the engine does, and return the seconds of its phases in the last micro-batch.

    With more than one micro-batch, the backward of the first, whose gradients wait for the last one's, is a phase too.
    """
    device, seconds = batch.inputs.device, {}
    meet()
    engine.model.train()
    for i in range(1, micro_batches + 1):
        engine.set_grad_sync(i == micro_batches)
        marks = [_now(device)]
        with autocast(engine.run.config.precision, device):
            loss: Tensor = engine.model(batch.inputs, batch.targets)
        if device.type == "cuda":
            seconds[STARTING] = time.perf_counter() - marks[0]
        marks.append(_now(device))
        engine.backward(loss * (engine.data_size / micro_batches / batch.targets.numel()))
        marks.append(_now(device))
        if i == 1 < micro_batches:
            seconds[ACCUMULATION] = marks[2] - marks[1]
    engine.optimizer.step(1e-4, loss.detach() / batch.targets.numel())
    marks.append(_now(device))
    return seconds | {phase: after - before for phase, (before, after) in zip(PHASES, pairwise(marks), strict=True)}


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


class LayerProbe:
    """Models of few and of more blocks for each recipe, whose phases are timed in turn, a round at a time.

    accumulates: backwards that no exchange follows are timed too.
    """

    def __init__(self, recipes: Sequence[str], config: RunConfig, world: World, *, accumulates: bool = False) -> None:
        self.recipes, self.accumulates = recipes, accumulates
        self.engines: dict[tuple[str, int], TorchEngine] = {}
        self.batches: dict[tuple[str, int], Batch] = {}
        self.samples: dict[tuple[str, int, str], list[float]] = {}
        for recipe in recipes:
            for depth in (FEW, MORE):
                run = run_of(recipe, dataclasses.replace(config, n_layer=depth), world)
                self.engines[recipe, depth], self.batches[recipe, depth] = engine_of(run), batch_of(run)
        self.rounds = -WARM_UP

    def round(self) -> None:
        """Time a step of each model, behind one that brings it back into the caches. The first rounds warm up."""
        for (recipe, depth), engine in self.engines.items():
            first = phase_seconds(engine, self.batches[recipe, depth], 2 if self.accumulates else 1)
            phases = phase_seconds(engine, self.batches[recipe, depth])
            phases |= {phase: seconds for phase, seconds in first.items() if phase not in phases}
            for phase, seconds in phases.items():
                if self.rounds >= 0:
                    self.samples.setdefault((recipe, depth, phase), []).append(seconds)
        self.rounds += 1

    def times(self) -> dict[str, LayerTimes]:
        """Return the times of each recipe's layers."""
        times = summary(self.samples)
        phases = list(dict.fromkeys(phase for _, _, phase in times))
        by_depth = {r: {d: {p: times[r, d, p] for p in phases} for d in (FEW, MORE)} for r in self.recipes}
        return {recipe: _apart(depths) for recipe, depths in by_depth.items()}

    def close(self) -> None:
        """Close the engines."""
        for engine in self.engines.values():
            engine.close()


def _apart(times: Mapping[int, Mapping[str, Timing]]) -> LayerTimes:
    block, rest = {}, {}
    for phase, few in times[FEW].items():
        more = times[MORE][phase]
        error = math.hypot(few.seconds * few.spread, more.seconds * more.spread) / math.sqrt(few.repeats)
        # A phase that costs nothing is still no negative one.
        one = max((more.seconds - few.seconds) / (MORE - FEW), 1e-3 * few.seconds)
        others = max(few.seconds - FEW * one, 1e-3 * few.seconds)
        block[phase] = Timing(one, min(UNKNOWN, error / (MORE - FEW) / one), few.repeats)
        rest[phase] = Timing(others, min(UNKNOWN, 1.5 * error / others), few.repeats)
    return LayerTimes(block, rest)
