"""Options that make a run need less memory, the cheapest in speed first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.options import default_recipe_config
from gptscale.recipes import get

# Strategies that hold less on each device, in turn. A world of one has nothing to split, but a host beside it.
SPLITS = ("fsdp", "zero_offload")
# How many of the remedies are worth a simulation each.
TRIES = 5


def remedies(
    recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int
) -> Iterator[tuple[str, str, RunConfig, RecipeConfig]]:
    """Yield ways to need less: the words to add to the command, and the recipe with its options.

    The global batch stays as it is: a smaller micro-batch is made up for by accumulation.
    """
    less = dataclasses.replace
    full = {"activation_checkpointing": "full"}
    small = {"micro_batch_size": 1, "grad_accum_steps": None}
    can_recompute = config.activation_checkpointing != "full"
    can_cut = config.micro_batch_size != 1
    if can_recompute:
        yield "--activation-checkpointing full", recipe, less(config, **full), recipe_config
    if can_cut:
        yield "--micro-batch-size 1", recipe, less(config, **small), recipe_config
    smallest = less(config, **full, **small)
    if can_recompute and can_cut:
        yield "--activation-checkpointing full --micro-batch-size 1", recipe, smallest, recipe_config
    for other in SPLITS:
        if other == recipe or (nproc == 1 and other == "fsdp") or "dp" not in (get(recipe).axes or ("dp",)):
            continue
        try:
            options = default_recipe_config(other)
        except ConfigError:
            continue
        plain = less(
            smallest, precision="bf16" if config.precision == "fp8" else config.precision, optimizer_state="fp32"
        )
        yield f"recipe {other} --activation-checkpointing full --micro-batch-size 1", other, plain, options
