"""The parameters that one rank holds, by their shapes alone: cut by stages and over tensor ranks, whatever data ranks do.

The formula of a recipe's docstring for the bytes of state of one device is put into numbers here too. This module imports nothing
heavy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Place:
    """Where a rank is in the mesh of its run."""

    rank: int
    world_size: int
    tp_size: int
    pp_size: int

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.pp_size)

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp_size * self.dp_size)

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size % self.dp_size


def place_of(run: Run) -> Place:
    """Return where the rank of a run is."""
    return Place(run.world.rank, run.world.world_size, run.tp_size, run.pp_size)


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
    if not hasattr(options, "stages_per_rank"):
        # Colossal-AI's stages are even.
        first, last = place_of(run).pp_rank == 0, place_of(run).pp_rank == run.pp_size - 1
        even, more = divmod(run.gpt.n_layer, run.pp_size)
        blocks = even + (run.pp_size - more - 1 <= place_of(run).pp_rank - 0 < run.pp_size - 1 if more else False)
        return ({"wte", "wpe"} if first else set()) | ({"wte", "ln_f"} if last else set()), blocks
    sizes = stage_sizes(run, options)
    indices = stage_indices(options.schedule, place_of(run).pp_rank, run.pp_size, len(sizes))
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
    """Return the letters of the formulas, which common/recipe_config.py explains."""
    gpt, world = run.gpt, run.world
    per_stage = run.tp_size * run.batch.dp_size
    ranks = (dataclasses.replace(world, rank=per_stage * stage) for stage in range(run.pp_size))
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
