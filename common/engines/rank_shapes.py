"""The parameters that one rank holds, by their shapes alone: cut by stages and over tensor ranks, whatever data ranks do.

The formula of a recipe's docstring for the bytes of state of one device is put into numbers here too. This module imports nothing
heavy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from gptscale.common.engines.pipeline.stages import stage_indices, stage_sizes
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import CUT_DIMS, Weight

Shapes = dict[str, tuple[int, ...]]


def held_shapes(run: Run, config: RecipeConfig) -> tuple[Shapes, list[Shapes], Shapes]:
    """Return the parameters before blocks, of each block, and behind, that this rank has, cut over tensor ranks only."""
    first, last, n_blocks = stage_of(run, config)
    before, behind = run.gpt.of_stage(first, last)
    block = _cut(run.gpt.weights().block, run.tp_size, config)
    return _cut(before, run.tp_size, config), [block] * n_blocks, _cut(behind, run.tp_size, config)


def stage_of(run: Run, config: RecipeConfig) -> tuple[bool, bool, int]:
    """Return whether this rank has the first stage, whether it has the last, and how many blocks it has."""
    if run.pp_size == 1:
        return True, True, run.gpt.n_layer
    options: Any = config
    if hasattr(options, "stages_per_rank"):
        sizes, schedule = stage_sizes(run, options), options.schedule
    else:
        from gptscale.common.engines.colossal import checks as colossal

        sizes, schedule = colossal.stage_sizes(run.gpt.n_layer, run.pp_size, options.chunks), ""
    indices = stage_indices(schedule, run.mesh.place("pp", run.world.rank), run.pp_size, len(sizes))
    return 0 in indices, len(sizes) - 1 in indices, sum(sizes[i] for i in indices)


def _cut(weights: Iterable[Weight], tp_size: int, config: RecipeConfig) -> Shapes:
    cut = {}
    for name, shape, _, kind, _ in weights:
        dim = None if kind == config.keeps_whole else CUT_DIMS[kind]
        cut[name] = shape if dim is None else tuple(n // tp_size if i == dim else n for i, n in enumerate(shape))
    return cut


def numel(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the elements of all shapes."""
    return sum(math.prod(shape) for shape in shapes)


def all_shapes(run: Run, config: RecipeConfig) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters that this rank has, in the model's order, cut over tensor ranks only."""
    before, blocks, behind = held_shapes(run, config)
    return [shape for part in (before, *blocks, behind) for shape in part.values()]


def state_formula(run: Run, config: RecipeConfig) -> tuple[str, float] | None:
    """Return a recipe's formula and its bytes, None without one for these options and this optimizer."""
    formula = "" if run.config.is_own and run.tp_size * run.pp_size > 1 else config.state_formula(run)
    if not formula or run.config.optimizer != "adamw" or run.config.optimizer_state != "fp32":
        return None
    # A factor stands behind a space.
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return formula, float(eval(product, {"__builtins__": {}}, _symbols(run, config)))


def _symbols(run: Run, config: RecipeConfig) -> dict[str, float]:
    """Return the letters of the formulas, by LETTERS of common/recipe_config.py."""
    gpt, world = run.gpt, run.world
    ranks = (dataclasses.replace(world, rank=rank) for rank in run.mesh.ranks("pp"))
    return {
        "N": gpt.n_params,
        "n": max(numel(all_shapes(dataclasses.replace(run, world=rank), config)) for rank in ranks),
        "d": run.batch.dp_size,
        "c": run.cp_size,
        "t": run.tp_size,
        "p": run.pp_size,
        "b": 4 if run.config.precision == "fp32" else 2,
        "h": gpt.n_embd,
        "L": gpt.n_layer,
    }
