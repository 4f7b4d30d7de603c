"""The two steps by which a torch recipe builds its model: the shape without memory, then the weights of its own shards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import nn

from gptscale.common.model.activation_checkpointing import apply_activation_checkpointing
from gptscale.common.model.attention import apply_attention
from gptscale.common.model.compilation import apply_compile
from gptscale.common.model.float8 import apply_float8
from gptscale.common.model.gpt import Decoder
from gptscale.common.model.initial_weights import init_weights
from gptscale.common.settings.families import model_class
from gptscale.common.settings.run import Run
from gptscale.common.state import shard_of

M = TypeVar("M", bound=nn.Module)


def meta_gpt(run: Run, under: AbstractContextManager[object] | None = None) -> Decoder:
    """Build the model of a run on the meta device, where it takes no memory and can be sharded.

    float8, the kernel of attention, activation checkpointing and compilation are applied to its blocks as the run asks.
    under: a context that creates the parameters in another way than on the meta device.
    """
    with under or torch.device("meta"):
        model: Decoder = model_class(run.gpt)(run.gpt)
    if run.config.precision == "fp8":
        apply_float8(model.blocks)
    apply_attention(model.blocks, run.config.attention)
    apply_activation_checkpointing(model.blocks, run.config.activation_checkpointing)
    if run.config.compile:
        apply_compile(model.blocks, run.config.compile_mode)
    return model


def materialise(model: M, run: Run, device: torch.device) -> M:
    """Allocate the parameters that this process holds on `device`, and fill them with the initial weights of the run.

    model: a model or a stage of one, on the meta device. Its parameters may be DTensors.
    """
    model.to_empty(device=device)
    init_weights((shard_of(f"model/{name}", p) for name, p in model.named_parameters()), run.gpt, run.config.seed)
    return model
