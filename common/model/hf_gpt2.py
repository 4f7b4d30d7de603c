"""GPT-2 as transformers has it: its config, and the layout of its weights.

The numbers are the same under other names. Two layouts differ. transformers stores the matrices of a block as (in, out), this
package as (out, in). And the rows of query, key and value are (3, n_head, head_dim) there and (n_head, 3, head_dim) here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.shape import ModelConfig, Weight

# Activations: the name here, then the name in transformers.
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_erf": "gelu", "gelu_sigmoid": "quick_gelu"}
# Fields of the config: the name here, then the name in transformers.
NAMES = {name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
NAMES |= {"block_size": "n_positions", "dropout": "resid_pdrop"}
# The matrix and the bias that compute query, key and value.
QKV = "attn.qkv."


def is_transposed(weight: Weight) -> bool:
    """Return whether a weight is the transpose of transformers'."""
    return weight.is_matrix and weight.cut in ("rows", "columns")


def qkv_to_hf(value: Tensor, n_head: int) -> Tensor:
    """Bring the rows of `attn.qkv`, (n_head, 3, head_dim) in dim 0, into the order of transformers."""
    reordered: Tensor = value.unflatten(0, (n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    return reordered


def to_hf(value: Tensor, weight: Weight, gpt: ModelConfig) -> Tensor:
    """Return our tensor in the layout of transformers."""
    value = qkv_to_hf(value, gpt.n_head) if weight.name.startswith(QKV) else value
    return value.t() if is_transposed(weight) else value


def from_hf(value: Tensor, weight: Weight, gpt: ModelConfig) -> Tensor:
    """Return transformers' tensor in our layout, the inverse of `to_hf`."""
    value = value.t() if is_transposed(weight) else value
    if weight.name.startswith(QKV):
        value = value.unflatten(0, (3, gpt.n_head, -1)).transpose(0, 1).flatten(0, 2)
    return value


def hf_config(gpt: ModelConfig, vocab_size: int) -> Any:
    """Return the configuration of transformers for the same shape, with a token table of `vocab_size` rows.

    All three dropout rates of transformers are set to `gpt.dropout`.
    """
    from transformers import GPT2Config

    options = {theirs: getattr(gpt, ours) for ours, theirs in NAMES.items()} | {"vocab_size": vocab_size}
    options |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), gpt.dropout)
    activation = ACTIVATIONS[gpt.activation.replace("custom-", "gelu_")]
    return GPT2Config(**options, activation_function=activation, bos_token_id=None, eos_token_id=None)


def config_of(hf: Any) -> GPTConfig:
    """Return the shape of a GPT2LMHeadModel, or raise ValueError for a variant that this model does not have.

    Such are an untied head, another activation, or an inner width other than 4 n_embd.
    """
    c = hf.config
    activations = {hf_name: name for name, hf_name in ACTIVATIONS.items()}
    tied = hf.lm_head.weight is hf.transformer.wte.weight
    if not tied or c.activation_function not in activations or c.n_inner not in (None, 4 * c.n_embd):
        raise ValueError(
            f"not GPT-2's usual form: tied head {tied}, activation {c.activation_function}, n_inner {c.n_inner}; "
            f"needed: a tied head, one of {sorted(activations)}, n_inner None or 4 n_embd"
        )
    fields = {ours: getattr(c, theirs) for ours, theirs in NAMES.items()}
    return GPTConfig(**fields, activation=activations[c.activation_function])
