"""The shape of a GPT, and the presets that recipes train."""

from __future__ import annotations

from dataclasses import dataclass

from gptscale.common.errors import ConfigError

# f(x) = x P(x) with P the normal distribution or one of its approximations (ops/gelu.py has the formulas). custom-* are
# the package's own operators for the same three functions.
ACTIVATIONS = ("gelu_tanh", "gelu_erf", "gelu_sigmoid", "custom-tanh", "custom-erf", "custom-sigmoid")
# The embedding table has a multiple of this many rows in memory: whole GEMM tiles, and divisible by 2..128 tensor ranks.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT-2 style decoder (pre-norm, learned positions, tied head).

    vocab_size: the number of ids that exist. The table in memory has `padded_vocab_size` rows, and no padding row is ever
    predicted. lr: AdamW learning rate that suits the shape. activation: one of ACTIVATIONS; GPT-2's is gelu_tanh.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    lr: float = 5e-4
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        for field in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"{field} {getattr(self, field)} is not positive", "in the model", f"use {field} >= 1"
                )
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}",
                "in the model",
                f"use n_head {nearest_divisor(self.n_embd, self.n_head)}",
            )
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"unknown activation {self.activation!r}", "in --activation", "use one of: " + " ".join(ACTIVATIONS)
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout {self.dropout} is outside [0, 1)", "in the model", "use --dropout 0")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def n_params_in_memory(self) -> int:
        """Return the number of parameters with the table's padding rows, of which state and traffic are made."""
        return self.n_params + (self.padded_vocab_size - self.vocab_size) * self.n_embd

    @property
    def n_params(self) -> int:
        """Return the number of parameters, with the tied head once and no padding rows (1,557,611,200 for `1.6b`)."""
        h = self.n_embd
        # qkv 3h^2+3h, proj h^2+h, mlp 8h^2+5h, two LayerNorms 4h
        per_block = 12 * h * h + 13 * h
        return self.n_layer * per_block + (self.vocab_size + self.block_size) * h + 2 * h

    @property
    def largest_weight(self) -> int:
        """Return the elements of the largest weight: a table, or a matrix of the MLP if the tables are small."""
        return max(self.padded_vocab_size, self.block_size, 4 * self.n_embd) * self.n_embd

    @property
    def n_matmul_params(self) -> int:
        """Return the number of parameters that a token is multiplied with: blocks' matrices and the tied head."""
        return 12 * self.n_layer * self.n_embd**2 + self.vocab_size * self.n_embd


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


def nearest_divisor(number: int, target: int) -> int:
    """Return the divisor of `number` nearest to `target`, and of two equally near ones the smaller."""
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: (abs(d - target), d))
