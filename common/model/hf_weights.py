"""Conversion of weights to and from GPT2LMHeadModel of Hugging Face's transformers.

The numbers are the same under other names. Two layouts differ. transformers stores the matrices of a block as (in, out), this
package as (out, in). And the rows of query, key and value are (3, n_head, head_dim) there and (n_head, 3, head_dim) here.
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

# Modules of a block: the name here, then the name in transformers.
BLOCK_NAMES = {
    "ln_1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "ln_2": "ln_2",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}
# Activations: the name here, then the name in transformers.
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu", "gelu_sigmoid": "quick_gelu"}


def name_pairs(n_layer: int) -> Iterator[tuple[str, str, bool]]:
    """Yield each parameter's name here, its name in transformers, and whether its matrix is transposed there."""
    yield "wte.weight", "transformer.wte.weight", False
    yield "wpe.weight", "transformer.wpe.weight", False
    for i in range(n_layer):
        for module, hf_module in BLOCK_NAMES.items():
            for kind in ("weight", "bias"):
                transposed = kind == "weight" and not module.startswith("ln")
                yield f"blocks.{i}.{module}.{kind}", f"transformer.h.{i}.{hf_module}.{kind}", transposed
    yield "ln_f.weight", "transformer.ln_f.weight", False
    yield "ln_f.bias", "transformer.ln_f.bias", False


def qkv_to_hf(value: Tensor, n_head: int) -> Tensor:
    """Bring the rows of `attn.qkv`, (n_head, 3, head_dim) in dim 0, into the order of transformers."""
    reordered: Tensor = value.unflatten(0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return reordered


def qkv_from_hf(value: Tensor, n_head: int) -> Tensor:
    """Bring rows in the order of transformers into that of `attn.qkv`, the inverse of `qkv_to_hf`."""
    reordered: Tensor = value.unflatten(0, (3, n_head, -1)).transpose(0, 1).flatten(0, 2)
    return reordered


def hf_config(gpt: GPTConfig, vocab_size: int) -> GPT2Config:
    """Return the configuration of transformers for the same shape, with a token table of `vocab_size` rows.

    All three dropout rates of transformers are set to `gpt.dropout`.
    """
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
    """Return a GPT2LMHeadModel with the weights of `model` (unsharded, fp32) and the same logits.

    The padding rows of the token table are left out. Dropout is that of the model in all three places, not the default of 0.1 of
    transformers. Needs the package `transformers`.
    """
    from transformers import GPT2LMHeadModel

    gpt = model.config
    hf = GPT2LMHeadModel(hf_config(gpt, gpt.vocab_size))
    parameters, hf_parameters = dict(model.named_parameters()), dict(hf.named_parameters())
    for name, hf_name, transposed in name_pairs(gpt.n_layer):
        value: Tensor = parameters[name]
        if "qkv" in name:
            value = qkv_to_hf(value, gpt.n_head)
        if transposed:
            value = value.t()
        if name == "wte.weight":
            value = value[: gpt.vocab_size]
        hf_parameters[hf_name].copy_(value)
    return hf


@torch.no_grad()
def from_hf(hf: GPT2LMHeadModel) -> GPT:
    """Return a GPT (CPU, fp32) with the weights of a GPT2LMHeadModel and the same logits.

    Raises ValueError for a variant that this model does not have: an untied head, another activation, or an inner width other
    than 4 n_embd.
    """
    c = hf.config
    activations = {hf_name: name for name, hf_name in ACTIVATIONS.items()}
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
    hf_parameters = dict(hf.named_parameters())
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for name, hf_name, transposed in name_pairs(gpt.n_layer):
        value: Tensor = hf_parameters[hf_name]
        if transposed:
            value = value.t()
        if "qkv" in name:
            value = qkv_from_hf(value, gpt.n_head)
        if name == "wte.weight":
            parameters[name][gpt.vocab_size :] = 0
            parameters[name][: gpt.vocab_size].copy_(value)
        else:
            parameters[name].copy_(value)
    return model
