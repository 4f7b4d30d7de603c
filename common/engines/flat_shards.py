"""Flattened shards as named boxes: engines that cut one long vector of parameters wherever it falls (ZeRO, FlatParameter)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from gptscale.common.state import Shard


def shards_of_range(name: str, flat: Tensor, shape: tuple[int, ...], begin: int) -> Iterator[Shard]:
    """The boxes that elements `begin` to `begin + flat.numel()` of a row-major tensor of `shape` are, as views of `flat`.

    flat: contiguous, 1-D. A cut in the middle of a row makes a box of its own on either side: at most three for a matrix.
    """
    if flat.numel():
        yield from _boxes(name, flat.detach(), shape, shape, begin, ())


def _boxes(
    name: str, flat: Tensor, whole: tuple[int, ...], shape: tuple[int, ...], begin: int, offset: tuple[int, ...]
) -> Iterator[Shard]:
    """`shape` is what is left of `whole` inside the box at `offset`, whose leading dims are all 1 long."""
    ones = (1,) * len(offset)
    if len(shape) == 1:
        yield Shard(name, flat.view(*ones, flat.numel()), whole, (*offset, begin))
        return
    row = math.prod(shape[1:])
    end = begin + flat.numel()
    first, last = -(-begin // row), end // row  # the whole rows: first to last
    if first > last:  # inside a single row
        yield from _boxes(name, flat, whole, shape[1:], begin - last * row, (*offset, last))
        return
    if head := first * row - begin:
        yield from _boxes(name, flat[:head], whole, shape[1:], row - head, (*offset, first - 1))
    if last > first:
        rows = flat[head : head + (last - first) * row].view(*ones, last - first, *shape[1:])
        yield Shard(name, rows, whole, (*offset, first, *(0,) * (len(shape) - 1)))
    if tail := end - last * row:
        yield from _boxes(name, flat[flat.numel() - tail :], whole, shape[1:], 0, (*offset, last))
