"""Pairs of a recipe and an option that do not work together: refused before a run starts, and a table in docs/recipes."""

from __future__ import annotations

from typing import NamedTuple

from gptscale.common.config import RecipeConfig, RunConfig
from gptscale.common.errors import ConfigError
from gptscale.common.pipeline_plan import SPLIT_BACKWARD


class Pair(NamedTuple):
    """`recipes` cannot have `option` at one of `values`: why, and what to do instead.

    only_if: an option of the recipe's own and its values, without which the pair is fine.
    """

    recipes: tuple[str, ...]
    option: str
    values: tuple[object, ...]
    why: str
    instead: str
    only_if: tuple[str, tuple[object, ...]] | None = None


COLOSSALAI = ("colossal_tensor", "colossal_pipeline", "colossal_gemini", "colossal_zero")
UNSUPPORTED = (
    Pair(
        ("fairscale_sdp", "fairscale_fsdp", "accelerate_fsdp", "lightning_fabric"),
        "precision",
        ("fp16",),
        "these libraries keep their loss scale to themselves, it could be neither saved nor compared",
        "use bf16, or fp16 with ddp, fsdp or zero1 to zero3",
    ),
    Pair(
        ("zero3", "zero_infinity", "zero_offload"),
        "compile",
        (True,),
        "at stage 3 DeepSpeed gathers weights in hooks around each module, which break torch.compile's graph of a block",
        "use stage 1 or 2, or fsdp",
        only_if=("stage", (3,)),
    ),
    Pair(
        ("pipeline", "hybrid_3d"),
        "compile",
        (True,),
        "these schedules take backward apart at autograd's nodes, and a compiled block is one node",
        "use 1F1B or Interleaved1F1B",
        only_if=("schedule", SPLIT_BACKWARD),
    ),
    Pair(
        ("pipeline", "hybrid_3d"),
        "activation_checkpointing",
        ("selective",),
        "these schedules go through a block backward twice, and what selective checkpointing kept is gone after the first",
        "use full or none, or schedule 1F1B or Interleaved1F1B",
        only_if=("schedule", SPLIT_BACKWARD),
    ),
    Pair(
        COLOSSALAI,
        "precision",
        ("fp16",),
        "Colossal-AI keeps its loss scale to itself, it could be neither saved nor compared",
        "use bf16, or fp16 with tensor_parallel or fsdp",
    ),
    Pair(
        COLOSSALAI,
        "compile",
        (True,),
        "Colossal-AI replaces methods of transformers' model, and its layers communicate inside them",
        "use tensor_parallel, pipeline or fsdp",
    ),
    Pair(
        COLOSSALAI,
        "activation",
        ("custom-tanh", "custom-erf", "custom-sigmoid"),
        "the model is transformers' own, with transformers' activations",
        "use gelu_tanh, gelu_erf or gelu_sigmoid",
    ),
    Pair(
        COLOSSALAI,
        "activation_checkpointing",
        ("selective",),
        "transformers recomputes whole blocks only",
        "use full or none",
    ),
)


def check(recipe: str, config: RunConfig, recipe_config: RecipeConfig) -> None:
    """ConfigError if `recipe` does not work with one of the run's options."""
    for pair in UNSUPPORTED:
        value = getattr(config, pair.option)
        if recipe not in pair.recipes or value not in pair.values:
            continue
        if pair.only_if is None or getattr(recipe_config, pair.only_if[0]) in pair.only_if[1]:
            option = pair.option.replace("_", "-")
            raise ConfigError(
                f"{recipe} does not work with {pair.option} {value}: {pair.why}", f"in --{option}", pair.instead
            )


def as_markdown() -> str:
    """The table for docs/recipes/unsupported.md."""
    lines = ["| recipes | option | values | why | instead |", "| --- | --- | --- | --- | --- |"]
    for pair in UNSUPPORTED:
        values = ", ".join(f"`{value}`" for value in pair.values)
        names = ", ".join(f"`{name}`" for name in pair.recipes)
        names += f" with `--{pair.only_if[0]} {' or '.join(map(str, pair.only_if[1]))}`" if pair.only_if else ""
        lines.append(f"| {names} | `--{pair.option.replace('_', '-')}` | {values} | {pair.why} | {pair.instead} |")
    return "\n".join(lines) + "\n"
