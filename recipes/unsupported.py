"""Pairs of a recipe and an option that do not work together, refused before a run starts.

docs/recipes/unsupported.md has the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gptscale.common.engines.pipeline.stages import SPLIT_BACKWARD
from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import option_of
from gptscale.common.settings.families import MODELS
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes import RECIPES, Recipe, names_with


class Pair(NamedTuple):
    """Recipes that cannot have `option` at one of `values`, why, and what to do instead.

    applies: whether a row of the table is such a recipe. only_if: an option of the recipe's own and the values of it at
    which alone the pair does not work.
    """

    applies: Callable[[Recipe], bool]
    option: str
    values: tuple[object, ...]
    why: str
    instead: str
    only_if: tuple[str, tuple[object, ...]] | None = None

    @property
    def recipes(self) -> list[str]:
        """Return the names of these recipes, in the table's order, whose preset leaves a value of `only_if` possible."""
        field, values = self.only_if or ("", ())
        named = ((name, row) for name, row in RECIPES.items() if self.applies(row))
        return [name for name, row in named if field not in row.preset or row.preset[field] in values]


def trained_by(*engines: str) -> Callable[[Recipe], bool]:
    """Return a question to ask of a run: does one of these engines train it?"""
    return lambda row: row.engine in engines


is_deepspeed, is_colossalai = trained_by("deepspeed"), trained_by("colossalai")
# The exercise's baseline is by transformers alone, and Colossal-AI trains transformers' model too.
is_handout, has_transformers_model = trained_by("transformers"), trained_by("colossalai", "transformers")


def cuts_matrices(row: Recipe) -> bool:
    """Return whether torch cuts this recipe's matrices over tensor ranks."""
    return row.engine == "torch" and "tp" in row.axes


def has_stages(row: Recipe) -> bool:
    """Return whether torch runs this recipe's model in stages."""
    return row.engine == "torch" and "pp" in row.axes


FP8_INSTEAD = f"use bf16, or fp8 with {names_with(lambda row: row.fp8)}"
OWN_OPTIMIZER = f"use {names_with(lambda row: not row.library_optimizer)}"
UNSUPPORTED = (
    Pair(trained_by("fairscale", "accelerate", "lightning-fabric"), "precision", ("fp16",),
         "these libraries keep their loss scale to themselves, it could be neither saved nor compared",
         "use bf16, or fp16 with ddp, fsdp or zero1 to zero3"),
    Pair(lambda row: row.library_optimizer, "optimizer_state", ("bf16", "8bit"),
         "the optimizer is the library's own, or one that it takes apart, with fp32 state",
         OWN_OPTIMIZER),
    Pair(is_deepspeed, "optimizer", ("muon",),
         "DeepSpeed's own Muon orthogonalises before it clips, scales otherwise, and takes query, key and value as one matrix",
         OWN_OPTIMIZER),
    Pair(lambda row: row.library_optimizer and not is_deepspeed(row), "optimizer", ("muon",),
         "the library cuts or wraps an optimizer of torch's, and a cut matrix cannot be orthogonalised", OWN_OPTIMIZER),
    Pair(is_deepspeed, "precision", ("fp8",), "DeepSpeed makes and keeps its own copy of the weights, in fp32, bf16 or fp16",
         FP8_INSTEAD),
    Pair(cuts_matrices, "precision", ("fp8",),
         "a rank multiplies by a part of a matrix, and fp8 has one scale for the whole of it", FP8_INSTEAD),
    Pair(lambda row: not (row.fp8 or is_deepspeed(row) or cuts_matrices(row) or has_transformers_model(row)), "precision",
         ("fp8",), "its products in float8 have not been compared with one process's there", FP8_INSTEAD),
    Pair(trained_by("deepspeed", "colossalai"), "on_spike", ("skip",),
         "these libraries compute the norm and apply the step in one call", "use warn or stop, or skip with ddp or fsdp"),
    Pair(is_deepspeed, "compile", (True,),
         "at stage 3 DeepSpeed gathers weights in hooks around each module, which break torch.compile's graph of a block",
         "use stage 1 or 2, or fsdp", only_if=("stage", (3,))),
    Pair(has_stages, "compile", (True,),
         "these schedules take backward apart at autograd's nodes, and a compiled block is one node",
         "use 1F1B or Interleaved1F1B", only_if=("schedule", SPLIT_BACKWARD)),
    Pair(has_stages, "activation_checkpointing", ("selective",),
         "these schedules go through a block backward twice, and what selective checkpointing kept is gone after the first",
         "use full or none, or schedule 1F1B or Interleaved1F1B", only_if=("schedule", SPLIT_BACKWARD)),
    Pair(is_deepspeed, "save_async", (True,), "the state on disk would have to fit into memory to be copied aside",
         "leave it out", only_if=("offload", ("nvme",))),
    Pair(is_colossalai, "precision", ("fp16",),
         "Colossal-AI keeps its loss scale to itself, it could be neither saved nor compared",
         "use bf16, or fp16 with tensor_parallel or fsdp"),
    Pair(is_handout, "precision", ("fp16",), "the exercise's loop has no loss scale", "use bf16, or fp16 with single"),
    Pair(is_handout, "compile", (True,), "it is the exercise's step as it stands",
         "in a checkout use python -m benchmarks.model, whose handout_best is the same model compiled"),
    Pair(has_transformers_model, "precision", ("fp8",), "the model is transformers' own, with transformers' products",
         FP8_INSTEAD),
    Pair(is_colossalai, "compile", (True,),
         "Colossal-AI replaces methods of transformers' model, and its layers communicate inside them",
         "use tensor_parallel, pipeline or fsdp"),
    # These do not compile at all.
    Pair(lambda row: not (row.cuda_graphs or has_transformers_model(row)), "compile_mode",
         ("max-autotune", "reduce-overhead"),
         "CUDA graphs replay at fixed addresses, and these engines gather, exchange or free what lies there between replays",
         f"use max-autotune-no-cudagraphs, or {names_with(lambda row: row.cuda_graphs)}"),
    Pair(has_transformers_model, "model", tuple(name for name, family in MODELS.items() if family != "gpt2"),
         "the model is transformers' own, of GPT-2's family so far",
         f"use {names_with(lambda row: not has_transformers_model(row))}"),
    Pair(has_transformers_model, "attention", ("flash", "flash3", "cudnn", "efficient", "math"),
         "the model is transformers' own, with transformers' attention", "use auto"),
    Pair(has_transformers_model, "activation", ("custom-tanh", "custom-erf", "custom-sigmoid"),
         "the model is transformers' own, with transformers' activations", "use gelu_tanh, gelu_erf or gelu_sigmoid"),
    Pair(has_transformers_model, "activation_checkpointing", ("selective",), "transformers recomputes whole blocks only",
         "use full or none"),
)  # fmt: skip


def takes_any_model(row: Recipe) -> bool:
    """Return whether a recipe trains a model of one's own: it knows no weight by its name, or finds out what it may cut."""
    return not has_transformers_model(row) and (row.axes in ((), ("dp",)) or cuts_matrices(row) or has_stages(row))


def check(recipe: str, config: RunConfig, recipe_config: RecipeConfig) -> None:
    """Raise ConfigError if `recipe` does not work with one of the run's options."""
    if config.is_own and not takes_any_model(RECIPES[recipe]):
        what = f"{recipe} cuts sequences or weights that it knows by their names in the presets"
        fix = f"use {names_with(takes_any_model)}"
        raise ConfigError(what, "in --model", fix)
    for pair in UNSUPPORTED:
        value = getattr(config, pair.option)
        if value not in pair.values or recipe not in pair.recipes:
            continue
        if pair.only_if is None or getattr(recipe_config, pair.only_if[0]) in pair.only_if[1]:
            what = f"{recipe} does not work with {pair.option} {value}: {pair.why}"
            raise ConfigError(what, f"in {option_of(pair.option)}", pair.instead)
