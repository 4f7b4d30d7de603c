"""From a run to its GPT in two moves that every torch recipe makes: a shape without memory, then weights in its shards."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import nn

from gptscale.common.model.activation_checkpointing import apply_activation_checkpointing
from gptscale.common.model.attention import apply_attention
from gptscale.common.model.compilation import apply_compile
from gptscale.common.model.float8 import apply_float8
from gptscale.common.model.gpt import GPT
from gptscale.common.model.initial_weights import init_weights
from gptscale.common.settings.run import Run
from gptscale.common.state import shard_of

M = TypeVar("M", bound=nn.Module)


def meta_gpt(run: Run, under: AbstractContextManager[object] | None = None) -> GPT:
    """The run's GPT on the meta device (no memory), or as `under` makes its parameters, ready to be sharded.

    Its products in float8, kernel of attention, activation checkpointing and compilation are in place.
    """
    with under or torch.device("meta"):
        model = GPT(run.gpt)
    if run.config.precision == "fp8":
        apply_float8(model.blocks)
    apply_attention(model.blocks, run.config.attention)
    apply_activation_checkpointing(model.blocks, run.config.activation_checkpointing)
    if run.config.compile:
        apply_compile(model.blocks, run.config.compile_mode)
    return model


def materialise(model: M, run: Run, device: torch.device) -> M:
    """Give what this process holds of a GPT or a stage its memory on `device`, and the initial weights of the run's seed."""
    model.to_empty(device=device)
    init_weights((shard_of(f"model/{n}", p) for n, p in model.named_parameters()), run.gpt, run.config.seed)
    return model
