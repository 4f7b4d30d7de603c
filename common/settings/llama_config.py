"""The shape of Llama's family, and its presets: SmolLM, TinyLlama, Llama 3 and Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

from gptscale.common.errors import ConfigError
from gptscale.common.settings.shape import ModelConfig, Weight, Weights


class RotaryScaling(NamedTuple):
    """How Llama 3 stretches rotary positions from `original` to `factor` times as many.

    Turns with fewer than `low` periods in the original length are slowed by `factor`, those with more than `high` stay, and in
    between lies a straight line.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """The shape of a Llama style decoder (RMSNorm, SwiGLU, rotary positions, grouped queries, no biases).

    n_inner: width of the MLP. n_kv_head: heads of keys and values, of which each serves n_head / n_kv_head query heads.
    block_size: the length of a sequence unless --seq-len gives another; there is no table of positions. has_head: whether the
    head has a matrix of its own. qk_norm: whether queries and keys are normed in each head, as in Qwen3.
    """

    n_inner: int = 5632
    n_kv_head: int = 4
    head_dim: int = 64
    activation: str = "silu"
    has_head: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None

    family: ClassVar[str] = "llama"
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    hf_blocks: ClassVar[str] = "model.layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_head % self.n_kv_head:
            what = f"n_head {self.n_head} is not divisible by the {self.n_kv_head} heads of keys and values"
            raise ConfigError(what, "in the model", f"use a multiple, such as --n-head {2 * self.n_kv_head}")

    @property
    def kept_beside(self) -> int:
        """Return the gate behind its activation, and with qk_norm the queries and keys that are normed and then turned."""
        return self.n_inner + (self.n_head + self.n_kv_head) * self.head_dim * self.qk_norm

    def weights(self) -> Weights:
        """Return the weights, whose names in transformers are those of LlamaForCausalLM and Qwen3ForCausalLM."""
        h, table = self.n_embd, (self.padded_vocab_size, self.n_embd)
        queries, keys = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        norms = ("q", "k") if self.qk_norm else ()
        return Weights(
            [Weight("wte.weight", table, "model.embed_tokens.weight", "ids")],
            [
                Weight("ln_1.weight", (h,), "input_layernorm.weight"),
                Weight("attn.q.weight", (queries, h), "self_attn.q_proj.weight", "rows"),
                Weight("attn.k.weight", (keys, h), "self_attn.k_proj.weight", "rows"),
                Weight("attn.v.weight", (keys, h), "self_attn.v_proj.weight", "rows"),
                Weight("attn.proj.weight", (h, queries), "self_attn.o_proj.weight", "columns"),
                *(
                    Weight(f"attn.{x}_norm.weight", (self.head_dim,), f"self_attn.{x}_norm.weight", "heads")
                    for x in norms
                ),
                Weight("ln_2.weight", (h,), "post_attention_layernorm.weight"),
                Weight("mlp.gate.weight", (self.n_inner, h), "mlp.gate_proj.weight", "rows"),
                Weight("mlp.up.weight", (self.n_inner, h), "mlp.up_proj.weight", "rows"),
                Weight("mlp.proj.weight", (h, self.n_inner), "mlp.down_proj.weight", "columns"),
            ],
            [
                Weight("ln_f.weight", (h,), "model.norm.weight"),
                *([Weight("head.weight", table, "lm_head.weight", "ids")] if self.has_head else []),
            ],
        )


# Sizes as in the config.json of each model on huggingface.co: HuggingFaceTB/SmolLM-135M, TinyLlama/TinyLlama_v1.1 (llama-1b),
# meta-llama/Llama-3.2-1B, -3.1-8B and -3.1-70B (llama3-*), Qwen/Qwen3-0.6B and -4B. The two *-tiny have all parts and run
# anywhere. block_size is the length that they were first trained with. lr: as published for SmolLM, TinyLlama (arXiv 2401.02385)
# and Llama 3 of 8B and 70B (2407.21783), a guess elsewhere.
LLAMA3 = partial(LlamaConfig, block_size=8192, vocab_size=128256, n_kv_head=8, rope_theta=5e5)
QWEN3 = partial(LlamaConfig, vocab_size=151936, n_kv_head=8, head_dim=128, has_head=False, qk_norm=True, norm_eps=1e-6)
TINY = partial(LlamaConfig, 4, 4, 128, 128, 257, lr=1e-3, n_inner=352, n_kv_head=2)
PRESETS: dict[str, LlamaConfig] = {
    "llama-tiny": TINY(head_dim=32, rope_scaling=RotaryScaling(8.0, original=64)),
    "qwen3-tiny": TINY(head_dim=48, has_head=False, qk_norm=True, norm_eps=1e-6, rope_theta=1e6),
    "smollm-135m": LlamaConfig(30, 9, 576, 2048, 49152, lr=3e-3, n_inner=1536, n_kv_head=3, has_head=False),
    "llama-1b": LlamaConfig(22, 32, 2048, 2048, 32000, lr=4e-4),
    "llama3-1b": LLAMA3(16, 32, 2048, n_inner=8192, has_head=False, rope_scaling=RotaryScaling(32.0), lr=3e-4),
    "llama3-8b": LLAMA3(32, 32, 4096, n_inner=14336, head_dim=128, rope_scaling=RotaryScaling(8.0), lr=3e-4),
    "llama3-70b": LLAMA3(80, 64, 8192, n_inner=28672, head_dim=128, rope_scaling=RotaryScaling(8.0), lr=1.5e-4),
    "qwen3-0.6b": QWEN3(28, 16, 1024, 4096, n_inner=3072, rope_theta=1e6, lr=3e-4),
    "qwen3-4b": QWEN3(36, 32, 2560, 4096, n_inner=9728, rope_theta=1e6, lr=3e-4),
}
