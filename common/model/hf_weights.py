"""Weights to and from transformers' GPT2LMHeadModel: the same numbers under its names.

Transposed where it transposes; our rows of query, key and value are (n_head, 3, head_dim), its are (3, n_head, head_dim).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptscale.common.model.gpt import GPT
from gptscale.common.settings.gpt_config import GPTConfig

if TYPE_CHECKING:
    from transformers import GPT2Config, GPT2LMHeadModel

# ours: theirs; their Conv1D holds matrices as (in, out), ours are (out, in).
BLOCK_NAMES = {
    "ln_1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "ln_2": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu", "gelu_sigmoid": "quick_gelu"}


def name_pairs(n_layer: int) -> Iterator[tuple[str, str, bool]]:
    """(our parameter, theirs, whether the matrix is transposed) for the whole model."""
    yield "wte.weight", "transformer.wte.weight", False
    yield "wpe.weight", "transformer.wpe.weight", False
    for i in range(n_layer):
        for ours, theirs in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                transposed = kind == "weight" and not ours.startswith("ln")
                yield f"blocks.{i}.{ours}.{kind}", f"transformer.h.{i}.{theirs}.{kind}", transposed
    yield "ln_f.weight", "transformer.ln_f.weight", False
    yield "ln_f.bias", "transformer.ln_f.bias", False


def qkv_to_hf(value: Tensor, n_head: int) -> Tensor:
    """Rows of our `attn.qkv`, (n_head, 3, head_dim) in dim 0, in transformers' order."""
    turned: Tensor = value.unflatten(0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return turned


def qkv_from_hf(value: Tensor, n_head: int) -> Tensor:
    """The inverse of `qkv_to_hf`."""
    turned: Tensor = value.unflatten(0, (3, n_head, -1)).transpose(0, 1).flatten(0, 2)
    return turned


def hf_config(gpt: GPTConfig, vocab_size: int) -> GPT2Config:
    """transformers' configuration of the same shape with a table of `vocab_size` rows; dropout is ours in all three places."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=gpt.block_size,
        n_embd=gpt.n_embd,
        n_layer=gpt.n_layer,
        n_head=gpt.n_head,
        activation_function=ACTIVATIONS[gpt.activation.replace("custom-", "gelu_")],
        resid_pdrop=gpt.dropout,
        embd_pdrop=gpt.dropout,
        attn_pdrop=gpt.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.no_grad()
def to_hf(model: GPT) -> GPT2LMHeadModel:
    """A GPT2LMHeadModel with this model's weights (unsharded, fp32) and equal logits; padding rows are left behind.

    Dropout is the model's, in all three places (transformers' default of 0.1 is not taken). Needs `transformers`.
    """
    from transformers import GPT2LMHeadModel

    gpt = model.config
    hf = GPT2LMHeadModel(hf_config(gpt, gpt.vocab_size))
    ours, theirs = dict(model.named_parameters()), dict(hf.named_parameters())
    for our_name, their_name, transposed in name_pairs(gpt.n_layer):
        value = qkv_to_hf(ours[our_name], gpt.n_head) if "qkv" in our_name else ours[our_name]
        value = value.t() if transposed else value
        theirs[their_name].copy_(value[: gpt.vocab_size] if our_name == "wte.weight" else value)
    return hf


@torch.no_grad()
def from_hf(hf: GPT2LMHeadModel) -> GPT:
    """A GPT (CPU, fp32) with the weights of a GPT2LMHeadModel and equal logits.

    ValueError for a variant that this model does not have (an untied head, another activation, an odd inner width).
    """
    c = hf.config
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    tied = hf.lm_head.weight is hf.transformer.wte.weight
    if not tied or c.activation_function not in activations or c.n_inner not in (None, 4 * c.n_embd):
        raise ValueError(
            f"not GPT-2's usual form: tied head {tied}, activation {c.activation_function}, n_inner {c.n_inner}; "
            f"needed: a tied head, one of {sorted(activations)}, n_inner None or 4 n_embd"
        )
    gpt = GPTConfig(
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        block_size=c.n_positions,
        vocab_size=c.vocab_size,
        dropout=c.resid_pdrop,
        activation=activations[c.activation_function],
    )
    model = GPT(gpt)
    ours: dict[str, Tensor] = dict(model.named_parameters())
    theirs = dict(hf.named_parameters())
    for our_name, their_name, transposed in name_pairs(gpt.n_layer):
        value = theirs[their_name].t() if transposed else theirs[their_name]
        value = qkv_from_hf(value, gpt.n_head) if "qkv" in our_name else value
        if our_name == "wte.weight":
            ours[our_name].zero_()  # the padding rows
            ours[our_name][: gpt.vocab_size].copy_(value)
        else:
            ours[our_name].copy_(value)
    return model
