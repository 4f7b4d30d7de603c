"""The operations whose seconds were timed as layers of models of two depths."""

from __future__ import annotations

import math

from gptscale.foresight.calibrate.layers import BACKWARD, FORWARD, MORE, STARTING, UNKNOWN, WHOLE, LayerProbe
from gptscale.foresight.calibrate.steps import LayersHere
from gptscale.foresight.calibrate.timing import Timing
from gptscale.foresight.time.operations import LaunchShape
from gptscale.foresight.time.split import BLOCK, TENSOR
from gptscale.foresight.time.work import LAUNCHES, Operation


def layer_operations(probe: LayerProbe, on: str) -> dict[Operation, Timing]:
    """Return the operations of all recipes of a probe. on: the device that they are filed under."""
    timings: dict[Operation, Timing] = {}
    for recipe, layers in probe.times().items():
        names = _names(probe, recipe)
        for what, by_phase in (("block", layers.block), ("head", layers.rest)):
            for phase, timing in by_phase.items():
                # The optimizer of the plain model is timed at each number of parameters, and it exchanges nothing.
                if phase != STARTING and (names.prefix or phase in (FORWARD, BACKWARD)):
                    timings[names.part(f"{what} {phase}")._replace(on=on)] = timing
        if recipe == WHOLE and STARTING in layers.block:
            tp = names.block.tp
            launches = LaunchShape(BLOCK + TENSOR * (tp > 1), tp)
            timings[Operation(LAUNCHES, launches, on)] = layers.block[STARTING]
    return timings


def elementwise_operation(probe: LayerProbe, again: LayerProbe, on: str) -> dict[Operation, Timing]:
    """Return what the backward of a block takes longer if all but its products is computed again."""
    plain, longer = (each.times()[WHOLE].block[BACKWARD] for each in (probe, again))
    seconds = max(longer.seconds - plain.seconds, 1e-2 * plain.seconds)
    error = math.hypot(plain.seconds * plain.spread, longer.seconds * longer.spread)
    timing = Timing(seconds, min(UNKNOWN, error / seconds), plain.repeats)
    return {Operation("block elementwise", tuple(_names(probe, WHOLE).block), on): timing}


def _names(probe: LayerProbe, recipe: str) -> LayersHere:
    run = probe.engines[recipe, MORE].run
    return LayersHere(recipe, run.gpt, run.seq_len, run.batch.micro_batch_size, run.world.world_size, run.tp_size)
