"""The shape of a model of one's own, whose weights are those of the module that common/model/own.py builds without memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from gptscale.common.settings.shape import ModelConfig, Weight, Weights


@dataclass(frozen=True)
class OwnConfig(ModelConfig):
    """The shape of transformers' model of a config, or of a module that a function returns.

    source: as --model names it. seed: of the values that its vectors begin with. identity: a hash of config or code, and of
    weights. The other numbers are counted in the module. n_head is 1 where no config tells it.
    """

    activation: str = "own"
    source: str = ""
    seed: int = 0
    identity: str = ""
    is_tied: bool = False
    n_params_in_memory: int = 0
    n_matmul_params: int = 0
    largest_weight: int = 0

    family: ClassVar[str] = "own"
    activations: ClassVar[tuple[str, ...]] = ("own",)

    def look(self) -> Any:
        return import_module("gptscale.common.model.own").look(self.source, self.dropout, self.seed)

    @property
    def padded_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def kept_beside(self) -> int:
        """Return the widths of all inputs of a block's products together, a bound: some inputs may be the same tensor."""
        return sum(weight.shape[1] for weight in self.weights().block if weight.is_matrix)

    def weights(self) -> Weights:
        """Return the weights outside blocks, and those of the first block."""
        rows, prefixes = self.look().rows.values(), self.look().prefixes
        # Tensor ranks cut a matrix by rows or by columns, which are as large.
        block = [
            w._replace(name=w.name.removeprefix(prefixes[0]), cut="rows" if len(w.shape) == 2 else "whole")
            for w in rows
            if w.name.startswith(prefixes[0])
        ]
        return Weights([w for w in rows if not w.name.startswith(prefixes)], block, [])

    def parameters(self) -> Iterator[tuple[Weight, str, str]]:
        yield from ((row, row.name, row.hf) for row in self.look().rows.values())

    def weight(self, name: str) -> Weight:
        return self.look().rows[name]  # type: ignore[no-any-return]

    def given(self, name: str) -> Any:
        """Return the initial values of a vector, and of any weight that has a file."""
        return self.look().given(name)

    def buffers(self) -> dict[str, Any]:
        return dict(self.look().named_buffers(remove_duplicate=False))
