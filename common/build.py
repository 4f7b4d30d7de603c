"""From a run to its GPT in two moves that every torch recipe makes: a shape without memory, then weights in its shards."""

from __future__ import annotations

import torch

from gptscale.common.activation_checkpointing import apply_activation_checkpointing, apply_compile
from gptscale.common.model import GPT, init_weights
from gptscale.common.run import Run
from gptscale.common.state import shard_of


def meta_gpt(run: Run) -> GPT:
    """The run's GPT on the meta device (no memory), with its activation checkpointing and compilation in place."""
    with torch.device("meta"):
        model = GPT(run.gpt)
    apply_activation_checkpointing(model.blocks, run.config.activation_checkpointing)
    if run.config.compile:
        apply_compile(model.blocks)
    return model


def materialise(model: GPT, run: Run, device: torch.device) -> GPT:
    """Give what this process holds of `model` its memory on `device`, and the initial weights of the run's seed."""
    model.to_empty(device=device)
    init_weights((shard_of(f"model/{n}", p) for n, p in model.named_parameters()), run.gpt, run.config.seed)
    return model
