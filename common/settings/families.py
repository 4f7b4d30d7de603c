"""The table of model families: a row names the modules of a family, which are imported once a model of it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gptscale.common.settings.shape import ModelConfig


class Family(NamedTuple):
    """A family of models.

    config: the module of common/settings with its PRESETS. model: the module of common/model and its class. hf: the module of
    common/model with its config and layouts in transformers. hf_types: what transformers calls such models. presets: their names.
    """

    config: str
    model: str
    hf: str
    hf_types: str
    presets: str


FAMILIES = {
    "gpt2": Family(
        "gpt_config", "gpt:GPT", "hf_gpt2", "gpt2",
        "tiny gpt2 gpt2-medium gpt2-large gpt2-xl 1.6b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b",
    ),
    "llama": Family(
        "llama_config", "llama:Llama", "hf_llama", "llama qwen3",
        "llama-tiny qwen3-tiny smollm-135m llama-1b llama3-1b llama3-8b llama3-70b qwen3-0.6b qwen3-4b",
    ),
    # One's own: hf:FOLDER_OR_config.json, FILE.py:NAME or package.module:NAME.
    "own": Family("own_config", "own:OwnModel", "", "", ""),
}  # fmt: skip
HF = "hf:"
# The family of each preset.
MODELS = {preset: name for name, row in FAMILIES.items() for preset in row.presets.split()}


def own_shape(run: Any) -> ModelConfig:
    """Return the shape of the model of a RunConfig that is one's own, after a look at it, which imports torch."""
    return import_module("gptscale.common.model.own").shape_of(run)  # type: ignore[no-any-return]


def preset(name: str) -> ModelConfig:
    """Return the shape of a preset, by its name."""
    found: ModelConfig = import_module(f"gptscale.common.settings.{FAMILIES[MODELS[name]].config}").PRESETS[name]
    return found


def model_class(config: ModelConfig) -> Any:
    """Return the class of a config's model, which imports torch."""
    module, _, name = FAMILIES[config.family].model.partition(":")
    return getattr(import_module(f"gptscale.common.model.{module}"), name)


def in_transformers(family: str) -> Any:
    """Return the module with a family's config and layouts in transformers."""
    return import_module(f"gptscale.common.model.{FAMILIES[family].hf}")
