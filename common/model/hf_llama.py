"""Llama and Qwen3 as transformers has them: their config. The layout of their weights is the same here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gptscale.common.settings.llama_config import LlamaConfig, RotaryScaling
from gptscale.common.settings.shape import Weight

# Fields of the config: the name here, then the name in transformers.
NAMES = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
    "block_size": "max_position_embeddings", "vocab_size": "vocab_size", "dropout": "attention_dropout",
    "n_inner": "intermediate_size", "n_kv_head": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
}  # fmt: skip
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def to_hf(value: Tensor, weight: Weight, llama: LlamaConfig) -> Tensor:
    """Return our tensor in the layout of transformers, which is ours."""
    return value


from_hf = to_hf


def hf_config(llama: LlamaConfig, vocab_size: int) -> Any:
    """Return the configuration of transformers for the same shape, with tables of `vocab_size` rows."""
    import transformers

    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": llama.rope_theta}
    if llama.rope_scaling:
        rotary |= {"rope_type": "llama3", **dict(zip(SCALING, llama.rope_scaling, strict=True))}
    options = {theirs: getattr(llama, ours) for ours, theirs in NAMES.items()} | {"vocab_size": vocab_size}
    kind: Any = transformers.Qwen3Config if llama.qk_norm else transformers.LlamaConfig
    ids = {"bos_token_id": None, "eos_token_id": None}
    return kind(**options, **ids, rope_parameters=rotary, tie_word_embeddings=not llama.has_head)


def config_of(hf: Any) -> LlamaConfig:
    """Return the shape of a LlamaForCausalLM or Qwen3ForCausalLM, or raise ValueError for a variant that is not here.

    Such are biases, another activation, sliding windows, and rotary positions that are stretched in another way than Llama 3's.
    """
    c = hf.config
    kind, windows = c.rope_parameters["rope_type"], getattr(c, "use_sliding_window", False)
    biases = c.attention_bias or getattr(c, "mlp_bias", False)
    if biases or c.hidden_act != "silu" or kind not in ("default", "llama3") or windows:
        raise ValueError(
            f"not Llama's usual form: biases {biases}, activation {c.hidden_act}, rope_type {kind}, sliding windows {windows}; "
            "needed: no biases, silu, default or llama3, no windows"
        )
    scaling = RotaryScaling(*(c.rope_parameters[name] for name in SCALING)) if kind == "llama3" else None
    return LlamaConfig(
        **{ours: getattr(c, theirs) for ours, theirs in NAMES.items()},
        has_head=not c.tie_word_embeddings,
        qk_norm=c.model_type == "qwen3",
        rope_theta=c.rope_parameters["rope_theta"],
        rope_scaling=scaling,
    )
