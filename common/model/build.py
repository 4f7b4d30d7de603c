"""The two steps by which a torch recipe builds its model: the shape without memory, then the weights of its own shards."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from gptscale.common.model import float8
from gptscale.common.model.attention import apply_attention
from gptscale.common.model.float8 import apply_float8
from gptscale.common.model.gpt import Decoder
from gptscale.common.model.initial_weights import init_weights
from gptscale.common.settings.families import model_class
from gptscale.common.settings.run import Run
from gptscale.common.settings.shape import ModelConfig
from gptscale.common.state import shard_of

aten = torch.ops.aten
# The mode `selective` keeps what costs much time for the bytes it takes: matrix products, and attention by any kernel (the kernel
# `math` consists of products). LayerNorm, GELU, additions and dropout are computed again.
KEPT_OPERATORS = [
    aten.mm.default, aten.addmm.default, aten.bmm.default, *float8.OPERATORS,
    aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
]  # fmt: skip


def apply_activation_checkpointing(blocks: Iterable[nn.Module], mode: str) -> None:
    """Change the forward of each block in place, so that it keeps fewer activations for backward (arXiv 1604.06174).

    mode: `none` changes nothing, `full` keeps only the input of the block, `selective` also the outputs of `KEPT_OPERATORS`.

    `block.forward` is replaced, and the block is not wrapped. Parameter names stay as they are, and the hooks that a strategy
    puts around the block (FSDP) do not run again in the recomputation.
    """
    if mode == "none":
        return
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_OPERATORS)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


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
        from gptscale.common.model.compilation import apply_compile

        apply_compile(model.blocks, run.config.compile_mode)
    return model


def materialise(model: M, run: Run, device: torch.device) -> M:
    """Allocate the parameters that this process holds on `device`, and fill them with the initial weights of the run.

    model: a model or a stage of one, on the meta device. Its parameters may be DTensors.
    """
    give_memory(model, run.gpt, device)
    init_weights((shard_of(f"model/{name}", p) for name, p in model.named_parameters()), run.gpt, run.config.seed)
    return model


def give_memory(model: nn.Module, gpt: ModelConfig, device: torch.device) -> None:
    """Allocate the parameters of a model on the meta device, tied ones once, and give its buffers their values."""
    tied = aliases(model)
    model.to_empty(device=device)
    for name, first in tied:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = model.get_parameter(first)
    set_buffers(model, gpt, device)


def aliases(model: nn.Module) -> list[tuple[str, str]]:
    """Return the further name of each parameter that several modules have, with its first name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(name, first[p]) for name, p in named if first.setdefault(p, name) != name]


def set_buffers(model: nn.Module, gpt: ModelConfig, device: torch.device) -> None:
    """Give the buffers of a model, or of a stage of one, the values that their modules gave them."""
    given = gpt.buffers()
    for name, _ in [*model.named_buffers(remove_duplicate=False)]:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = given[name].to(device, copy=True)
