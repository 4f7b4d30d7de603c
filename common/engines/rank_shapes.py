"""The parameters that one rank holds, by their shapes alone: cut by stages and over tensor ranks, whatever data ranks do.

The formula of a recipe's docstring for the bytes of state of one device is put into numbers here too. This module imports nothing
heavy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from gptscale.common.engines.pipeline.plan import stage_indices, stage_sizes
from gptscale.common.settings.gpt_config import GPTConfig

if TYPE_CHECKING:
    from gptscale.common.recipe_config import RecipeConfig
    from gptscale.common.settings.run import Run

Shapes = dict[str, tuple[int, ...]]
# The dimension that tensor ranks cut. A weight that is not named stays whole.
CUT_BY_TENSOR_RANKS = {
    "wte.weight": 0,
    "wpe.weight": 0,
    "attn.qkv.weight": 0,
    "attn.qkv.bias": 0,
    "attn.proj.weight": 1,
    "mlp.fc.weight": 0,
    "mlp.fc.bias": 0,
    "mlp.proj.weight": 1,
}


class Place(NamedTuple):
    """Where a rank is on the mesh of its run, and how large that is."""

    tp_size: int
    dp_size: int
    dp_rank: int
    pp_size: int
    pp_rank: int


def place_of(run: Run) -> Place:
    """Return where the rank of a run is."""
    mesh, rank = run.mesh, run.world.rank
    data, stages = ((mesh.size(axis), mesh.place(axis, rank)) for axis in ("dp", "pp"))
    return Place(mesh.size("tp"), *data, *stages)


def block_shapes(gpt: GPTConfig) -> Shapes:
    """Return the parameters of one block in the model's order."""
    h = gpt.n_embd
    return {
        "ln_1.weight": (h,),
        "ln_1.bias": (h,),
        "attn.qkv.weight": (3 * h, h),
        "attn.qkv.bias": (3 * h,),
        "attn.proj.weight": (h, h),
        "attn.proj.bias": (h,),
        "ln_2.weight": (h,),
        "ln_2.bias": (h,),
        "mlp.fc.weight": (4 * h, h),
        "mlp.fc.bias": (4 * h,),
        "mlp.proj.weight": (h, 4 * h),
        "mlp.proj.bias": (h,),
    }


def held_shapes(run: Run, config: RecipeConfig) -> tuple[Shapes, list[Shapes]]:
    """Return the parameters outside blocks and those of each block that this rank has, cut over tensor ranks only."""
    gpt, place = run.gpt, place_of(run)
    outside, n_blocks = stage_of(run, config)
    whole: Shapes = {
        "wte.weight": (gpt.padded_vocab_size, gpt.n_embd),
        "wpe.weight": (gpt.block_size, gpt.n_embd),
        "ln_f.weight": (gpt.n_embd,),
        "ln_f.bias": (gpt.n_embd,),
    }
    root = {name: shape for name, shape in whole.items() if name.split(".")[0] in outside}
    return _cut(root, place.tp_size, config.whole_weight), [_cut(block_shapes(gpt), place.tp_size)] * n_blocks


def stage_of(run: Run, config: RecipeConfig) -> tuple[set[str], int]:
    """Return which modules outside blocks this rank has, and how many blocks."""
    if run.pp_size == 1:
        return {"wte", "wpe", "ln_f"}, run.gpt.n_layer
    options: Any = config
    if hasattr(options, "stages_per_rank"):
        sizes, schedule = stage_sizes(run, options), options.schedule
    else:
        from gptscale.common.engines.colossal import checks as colossal

        sizes, schedule = colossal.stage_sizes(run.gpt.n_layer, run.pp_size, options.chunks), ""
    indices = stage_indices(schedule, place_of(run).pp_rank, run.pp_size, len(sizes))
    modules: set[str] = set()
    if 0 in indices:
        modules |= {"wte", "wpe"}
    if len(sizes) - 1 in indices:
        modules |= {"wte", "ln_f"}
    return modules, sum(sizes[i] for i in indices)


def _cut(shapes: Shapes, tp_size: int, but: str = "") -> Shapes:
    cut = {}
    for name, shape in shapes.items():
        dim = CUT_BY_TENSOR_RANKS.get(name) if name != but else None
        cut[name] = shape if dim is None else tuple(n // tp_size if i == dim else n for i, n in enumerate(shape))
    return cut


def numel(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the elements of all shapes."""
    return sum(math.prod(shape) for shape in shapes)


def all_shapes(run: Run, config: RecipeConfig) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters that this rank has, in the model's order, cut over tensor ranks only."""
    root, blocks = held_shapes(run, config)
    parts = [root, *blocks]
    last = {name: root.pop(name) for name in list(root) if name.startswith("ln_f")}
    return [shape for part in (*parts, last) for shape in part.values()]


def state_formula(run: Run, config: RecipeConfig) -> tuple[str, float] | None:
    """Return a recipe's formula and its bytes, None without one for these options and this optimizer."""
    formula = config.state_formula(run)
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
        "t": run.tp_size,
        "p": run.pp_size,
        "b": 4 if run.config.precision == "fp32" else 2,
        "h": gpt.n_embd,
        "L": gpt.n_layer,
    }
