"""Pairs of a recipe and an option that do not work together: refused before a run starts, and a table in docs/recipes."""

from __future__ import annotations

from typing import NamedTuple

from gptscale.common.engines.pipeline.plan import SPLIT_BACKWARD
from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run_config import RunConfig


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


MOVING = (
    "fsdp", "fsdp_offload", "zero1", "zero2", "zero3", "zero_offload", "zero_infinity", "fairscale_sdp", "fairscale_fsdp",
    "tensor_parallel", "pipeline", "hybrid_3d", "accelerate_fsdp", "lightning_fabric",
)  # fmt: skip
ZERO = ("zero1", "zero2", "zero3", "zero_offload", "zero_infinity")
LIBRARY_STEP = ("fairscale_sdp", "fairscale_fsdp", "accelerate_fsdp", "lightning_fabric")
WHOLE = "use bf16, or fp8 with single, ddp, fsdp or fsdp_offload"
COLOSSALAI = ("colossal_tensor", "colossal_pipeline", "colossal_gemini", "colossal_zero")
UNSUPPORTED = (
    Pair(
        LIBRARY_STEP,
        "precision",
        ("fp16",),
        "these libraries keep their loss scale to themselves, it could be neither saved nor compared",
        "use bf16, or fp16 with ddp, fsdp or zero1 to zero3",
    ),
    Pair(
        (*ZERO, *LIBRARY_STEP, *COLOSSALAI),
        "optimizer_state",
        ("bf16", "8bit"),
        "the optimizer is the library's own, or one that it takes apart, with fp32 state",
        "use single, ddp, fsdp, fsdp_offload, tensor_parallel, pipeline or hybrid_3d",
    ),
    Pair(
        ("zero1", "zero2", "zero3", "zero_offload", "zero_infinity"),
        "precision",
        ("fp8",),
        "DeepSpeed makes and keeps its own copy of the weights, in fp32, bf16 or fp16",
        WHOLE,
    ),
    Pair(
        ("tensor_parallel", "hybrid_3d"),
        "precision",
        ("fp8",),
        "a rank multiplies by a part of a matrix, and fp8 has one scale for the whole of it",
        WHOLE,
    ),
    Pair(
        ("pipeline", "fairscale_sdp", "fairscale_fsdp", "accelerate_fsdp", "lightning_fabric"),
        "precision",
        ("fp8",),
        "its products in float8 have not been held to one process there",
        WHOLE,
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
        "precision",
        ("fp8",),
        "the model is transformers' own, with transformers' products",
        WHOLE,
    ),
    Pair(
        COLOSSALAI,
        "compile",
        (True,),
        "Colossal-AI replaces methods of transformers' model, and its layers communicate inside them",
        "use tensor_parallel, pipeline or fsdp",
    ),
    Pair(
        MOVING,
        "compile_mode",
        ("max-autotune", "reduce-overhead"),
        "CUDA graphs replay at fixed addresses, and these engines gather, exchange or free what lies there between replays",
        "use max-autotune-no-cudagraphs, or single or ddp",
    ),
    Pair(
        COLOSSALAI,
        "attention",
        ("flash", "flash3", "cudnn", "efficient", "math"),
        "the model is transformers' own, with transformers' attention",
        "use auto",
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
