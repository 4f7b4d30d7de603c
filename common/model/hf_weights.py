"""Conversion of weights to and from the models of Hugging Face's transformers, which the package must be installed for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptscale.common.model.gpt import Decoder
from gptscale.common.settings.families import FAMILIES, in_transformers, model_class

INDEX = "model.safetensors.index.json"


def safetensors_in(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in a folder of transformers."""
    from safetensors import safe_open

    index = folder / INDEX
    files = {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {"model.safetensors"}
    where: dict[str, Path] = {}
    for path in (folder / Path(file).name for file in sorted(files)):
        with safe_open(path, framework="pt") as opened:
            where |= dict.fromkeys(opened.keys(), path)
    return where


@torch.no_grad()
def to_hf(model: Decoder) -> Any:
    """Return transformers' model with the weights of `model` (unsharded, fp32) and the same logits.

    The padding rows of the tables are left out. Dropout is that of the model, not the default of transformers.
    """
    from transformers import AutoModelForCausalLM

    config = model.config
    theirs = in_transformers(config.family)
    hf = AutoModelForCausalLM.from_config(theirs.hf_config(config, config.vocab_size))
    parameters, hf_parameters = dict(model.named_parameters()), dict(hf.named_parameters())
    for weight, name, hf_name in config.parameters():
        value = theirs.to_hf(parameters[name], weight, config)
        hf_parameters[hf_name].copy_(value[: config.vocab_size] if weight.cut == "ids" else value)
    return hf


@torch.no_grad()
def from_hf(hf: Any) -> Decoder:
    """Return our model (CPU, fp32) with the weights of transformers' and the same logits.

    Raises ValueError for a model of no family here, and for a variant that its family does not have.
    """
    kind = hf.config.model_type
    families = [name for name, row in FAMILIES.items() if kind in row.hf_types.split()]
    if not families:
        raise ValueError(f"no family here has models of type {kind}")
    theirs = in_transformers(families[0])
    config = theirs.config_of(hf)
    model: Decoder = model_class(config)(config)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    hf_parameters = dict(hf.named_parameters())
    for weight, name, hf_name in config.parameters():
        value = theirs.from_hf(hf_parameters[hf_name], weight, config)
        # The rows behind it are padding.
        parameters[name].zero_()[: len(value)].copy_(value)
    return model
