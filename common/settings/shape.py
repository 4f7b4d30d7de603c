"""The shape of a model: its weights as a list that its family writes once, and the numbers that follow from the list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gptscale.common.errors import ConfigError

# The embedding table has a multiple of this many rows in memory: whole GEMM tiles, and divisible by 2..128 tensor ranks.
VOCAB_MULTIPLE = 128
# The weight that a head without one of its own uses too.
TABLE = "wte.weight"
# The dimension of a weight that tensor ranks cut, by its kind. A `whole` weight has worked on each rank's part of the
# sequence, one of `heads` on each rank's heads.
CUT_DIMS = {"ids": 0, "positions": 0, "rows": 0, "columns": 1, "whole": None, "heads": None}


class Weight(NamedTuple):
    """A weight: its name, inside its block if it has one, its shape in memory, its name in transformers, and what is cut."""

    name: str
    shape: tuple[int, ...]
    hf: str
    cut: str = "whole"
    # The order of the rows of a weight that is several matrices: (heads, matrices, rows of a head).
    rows: tuple[int, ...] = ()

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """Return whether the weight decays, and in a block whether tokens are multiplied with it."""
        return len(self.shape) > 1


class Weights(NamedTuple):
    """The weights of a model, in its order: those before the blocks, those of each block, and those behind."""

    first: list[Weight]
    block: list[Weight]
    last: list[Weight]


def numel(weights: Iterable[Weight]) -> int:
    """Return the elements of all weights."""
    return sum(math.prod(weight.shape) for weight in weights)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder of any family.

    vocab_size: the number of ids that exist. The table in memory has `padded_vocab_size` rows, and no padding row is ever
    predicted. lr: AdamW learning rate that suits the shape.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    lr: float = 5e-4
    activation: str = "gelu_tanh"

    # The key of its row in common/settings/families.py, the activations that it has, and the blocks' name in transformers.
    family: ClassVar[str]
    activations: ClassVar[tuple[str, ...]]
    hf_blocks: ClassVar[str]

    def weights(self) -> Weights:
        raise NotImplementedError

    def __post_init__(self) -> None:
        for field in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if (value := getattr(self, field)) < 1:
                raise ConfigError(f"{field} {value} is not positive", "in the model", f"use {field} >= 1")
        if self.activation not in self.activations:
            fix = "use one of: " + " ".join(self.activations)
            raise ConfigError(f"unknown activation {self.activation!r}", "in --activation", fix)
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout {self.dropout} is outside [0, 1)", "in the model", "use --dropout 0")

    @property
    def identity(self) -> str:
        """Return a hash of what --model names, where that is no preset."""
        return ""

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def n_kv_head(self) -> int:
        return self.n_head

    @property
    def attention_width(self) -> int:
        """Return the numbers of all query heads of a token."""
        return self.n_head * self.head_dim

    @property
    def kept_beside(self) -> int:
        """Return the numbers of a token that a block keeps for backward beside its norms' and matrices' inputs and outputs."""
        return 0

    @property
    def is_tied(self) -> bool:
        """Return whether the head's matrix is the token table."""
        return all(weight.cut != "ids" for weight in self.weights().last)

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def n_params_in_memory(self) -> int:
        """Return the number of parameters with the tables' padding rows, of which state and traffic are made."""
        first, block, last = self.weights()
        return numel(first + last) + self.n_layer * numel(block)

    @property
    def n_params(self) -> int:
        """Return the number of parameters, with a tied head once and no padding rows (1,557,611,200 for `1.6b`)."""
        padding = (self.padded_vocab_size - self.vocab_size) * self.n_embd
        return self.n_params_in_memory - padding * (1 if self.is_tied else 2)

    @property
    def largest_weight(self) -> int:
        """Return the elements of the largest weight: a table, or a matrix of the MLP if the tables are small."""
        return max(numel([weight]) for part in self.weights() for weight in part)

    @property
    def block_matrices(self) -> list[int]:
        """Return the elements of each matrix of a block, in the order of their products."""
        return [numel([weight]) for weight in self.weights().block if weight.is_matrix]

    @property
    def n_matmul_params(self) -> int:
        """Return the number of parameters that a token is multiplied with: blocks' matrices and the head."""
        return self.n_layer * sum(self.block_matrices) + self.vocab_size * self.n_embd

    def parameters(self) -> Iterator[tuple[Weight, str, str]]:
        """Yield for each parameter of the model, in its order, its row of the list, its name, and its name in transformers."""
        first, block, last = self.weights()
        yield from ((w, w.name, w.hf) for w in first)
        for i in range(self.n_layer):
            yield from ((w, f"blocks.{i}.{w.name}", f"{self.hf_blocks}.{i}.{w.hf}") for w in block)
        yield from ((w, w.name, w.hf) for w in last)

    def given(self, name: str) -> Any:
        """Return the initial values of a parameter, to be read by rows. None: they are drawn by its name."""
        return None

    def buffers(self) -> dict[str, Any]:
        """Return the values of the model's buffers by their names."""
        return {}

    def weight(self, name: str) -> Weight:
        """Return the row of the list for a parameter of the model, such as `blocks.3.mlp.proj.weight`."""
        name = name.split(".", 2)[2] if name.startswith("blocks.") else name
        return next(weight for part in self.weights() for weight in part if weight.name == name)

    def of_stage(self, first: bool, last: bool) -> tuple[list[Weight], list[Weight]]:
        """Return the weights that a part of the model has before its blocks and behind them, as its ends need them."""
        weights = self.weights()
        table = [weight for weight in weights.first if weight.name == TABLE]
        return weights.first if first else table if last and self.is_tied else [], weights.last if last else []
