"""The mesh of a run: how many ranks each axis has, and where a rank is on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Outermost first. Tensor ranks send most, and are neighbours.
AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run on axes, each with a name and a size.

    sizes: the outermost axis first, so that ranks with following numbers are neighbours along the last one. An axis that is not
    there has one rank.
    """

    sizes: Mapping[str, int]

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.sizes.get(axis, 1)

    def stride(self, axis: str) -> int:
        """Return by how much the numbers of two neighbours along an axis differ."""
        names = list(self.sizes)
        return math.prod(self.sizes[inner] for inner in names[names.index(axis) + 1 :])

    def place(self, axis: str, rank: int) -> int:
        """Return where a rank is along an axis."""
        return rank // self.stride(axis) % self.size(axis) if axis in self.sizes else 0

    def ranks(self, axis: str) -> list[int]:
        """Return the ranks along an axis that are the first along all others."""
        return [place * self.stride(axis) for place in range(self.size(axis))]
