"""The shape of GPT-2's family, and its presets that recipes train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gptscale.common.errors import ConfigError
from gptscale.common.settings.shape import ModelConfig, Weight, Weights

# f(x) = x P(x) with P the normal distribution or one of its approximations (ops/gelu.py has the formulas). custom-* are
# the package's own operators for the same three functions.
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "gelu_sigmoid", "custom-tanh", "custom-erf", "custom-sigmoid")


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """The shape of a GPT-2 style decoder (pre-norm, learned positions, tied head).

    activation: one of ACTIVATIONS; GPT-2's is gelu_tanh.
    """

    family: ClassVar[str] = "gpt2"
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS
    hf_blocks: ClassVar[str] = "transformer.h"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_embd % self.n_head:
            divisors = (d for d in range(1, self.n_embd + 1) if self.n_embd % d == 0)
            # The smaller of two that are equally near.
            nearest = min(divisors, key=lambda d: (abs(d - self.n_head), d))
            what = f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}"
            raise ConfigError(what, "in the model", f"use n_head {nearest}")

    def weights(self) -> Weights:
        """Return the weights, whose names in transformers are those of GPT2LMHeadModel."""
        h = self.n_embd
        return Weights(
            [
                Weight("wte.weight", (self.padded_vocab_size, h), "transformer.wte.weight", "ids"),
                Weight("wpe.weight", (self.block_size, h), "transformer.wpe.weight", "positions"),
            ],
            [
                Weight("ln_1.weight", (h,), "ln_1.weight"),
                Weight("ln_1.bias", (h,), "ln_1.bias"),
                Weight("attn.qkv.weight", (3 * h, h), "attn.c_attn.weight", "rows", (self.n_head, 3, self.head_dim)),
                Weight("attn.qkv.bias", (3 * h,), "attn.c_attn.bias", "rows"),
                Weight("attn.proj.weight", (h, h), "attn.c_proj.weight", "columns"),
                Weight("attn.proj.bias", (h,), "attn.c_proj.bias"),
                Weight("ln_2.weight", (h,), "ln_2.weight"),
                Weight("ln_2.bias", (h,), "ln_2.bias"),
                Weight("mlp.fc.weight", (4 * h, h), "mlp.c_fc.weight", "rows"),
                Weight("mlp.fc.bias", (4 * h,), "mlp.c_fc.bias", "rows"),
                Weight("mlp.proj.weight", (h, 4 * h), "mlp.c_proj.weight", "columns"),
                Weight("mlp.proj.bias", (h,), "mlp.c_proj.bias"),
            ],
            [
                Weight("ln_f.weight", (h,), "transformer.ln_f.weight"),
                Weight("ln_f.bias", (h,), "transformer.ln_f.bias"),
            ],
        )


# The vocabulary is of bytes (256 and end of text), so that `tiny` spends its time in blocks and runs anywhere.
TINY = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=257, lr=1e-3)

# gpt2*: Radford et al. 2019, table 2. 1.6b: gpt2-xl with 32 heads of 50 instead of 25 of 64.
# gpt3-*: Brown et al. 2020, table 2.1, for planning (the same heads x head_dim, block 2048).
PRESETS: dict[str, GPTConfig] = {
    "tiny": TINY,
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768, lr=6e-4),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024, lr=3e-4),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280, lr=2.5e-4),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600, lr=2e-4),
    "1.6b": GPTConfig(n_layer=48, n_head=32, n_embd=1600, lr=5e-4),
    "gpt3-2.7b": GPTConfig(n_layer=32, n_head=32, n_embd=2560, block_size=2048, lr=1.6e-4),
    "gpt3-6.7b": GPTConfig(n_layer=32, n_head=32, n_embd=4096, block_size=2048, lr=1.2e-4),
    "gpt3-13b": GPTConfig(n_layer=40, n_head=40, n_embd=5120, block_size=2048, lr=1e-4),
    "gpt3-175b": GPTConfig(n_layer=96, n_head=96, n_embd=12288, block_size=2048, lr=0.6e-4),
}
