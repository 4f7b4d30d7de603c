"""The table of model families: a row names the modules of a family, which are imported once a model of it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gptscale.common.settings.shape import ModelConfig


class Family(NamedTuple):
    """A family of models, by `module:name` where a class is meant.

    config: the module with its PRESETS. model: its class. hf: the module with its config and layouts in transformers, and
    hf_types: what transformers calls such models. presets: the names of PRESETS.
    """

    config: str
    model: str
    hf: str
    hf_types: tuple[str, ...]
    presets: tuple[str, ...]


FAMILIES = {
    "gpt2": Family(
        "gptscale.common.settings.gpt_config",
        "gptscale.common.model.gpt:GPT",
        "gptscale.common.model.hf_gpt2",
        ("gpt2",),
        tuple("tiny gpt2 gpt2-medium gpt2-large gpt2-xl 1.6b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b".split()),
    ),
    "llama": Family(
        "gptscale.common.settings.llama_config",
        "gptscale.common.model.llama:Llama",
        "gptscale.common.model.hf_llama",
        ("llama", "qwen3"),
        tuple("llama-tiny qwen3-tiny smollm-135m llama-1b llama3-1b llama3-8b llama3-70b qwen3-0.6b qwen3-4b".split()),
    ),
}
# The family of each preset.
MODELS = {preset: name for name, row in FAMILIES.items() for preset in row.presets}


def preset(name: str) -> ModelConfig:
    """Return the shape of a preset, by its name."""
    found: ModelConfig = import_module(FAMILIES[MODELS[name]].config).PRESETS[name]
    return found


def model_class(config: ModelConfig) -> Any:
    """Return the class of a config's model, which imports torch."""
    module, _, name = FAMILIES[config.family].model.partition(":")
    return getattr(import_module(module), name)
