"""The formula of a recipe's docstring for the bytes of state of one device, put into numbers.

This module imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import re

from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.foresight.memory.state import all_shapes, numel


def state_formula(run: Run, config: RecipeConfig) -> tuple[str, float] | None:
    """Return a recipe's formula and its bytes, None without one for these options and this optimizer."""
    formula = config.state_formula(run)
    if not formula or run.config.optimizer != "adamw" or run.config.optimizer_state != "fp32":
        return None
    # A factor stands behind a space.
    product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
    return formula, float(eval(product, {"__builtins__": {}}, _symbols(run, config)))


def _symbols(run: Run, config: RecipeConfig) -> dict[str, float]:
    """Return the letters of the formulas, which common/recipe_config.py explains."""
    gpt, world = run.gpt, run.world
    ranks = (dataclasses.replace(world, rank=rank) for rank in run.mesh.ranks("pp"))
    return {
        "N": gpt.n_params,
        "n": max(numel(all_shapes(dataclasses.replace(run, world=rank), config)) for rank in ranks),
        "d": run.batch.dp_size,
        "t": run.tp_size,
        "p": run.pp_size,
        "b": 4 if run.config.precision == "fp32" else 2,
        "h": gpt.n_embd,
        "L": gpt.n_layer,
    }
