"""Flattened shards as named boxes, for engines that cut one long vector of parameters anywhere (ZeRO, FlatParameter)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from gptscale.common.state import Shard


def shards_of_range(name: str, flat: Tensor, shape: tuple[int, ...], begin: int) -> Iterator[Shard]:
    """Yield the boxes that cover elements `begin` to `begin + flat.numel()` of a row-major tensor of `shape`.

    The boxes are views of `flat`, which is contiguous and 1-D. If the range begins or ends in the middle of a row, that part
    of the row is a box of its own, so a matrix has at most three boxes.
    """
    if flat.numel():
        yield from _boxes(name, flat.detach(), shape, shape, begin, ())


def _boxes(
    name: str, flat: Tensor, full_shape: tuple[int, ...], shape: tuple[int, ...], begin: int, offset: tuple[int, ...]
) -> Iterator[Shard]:
    """Yield the boxes of `flat` inside the slice of the tensor at the leading indices `offset`.

    shape: the remaining dims of the tensor there. begin: the element of the slice with which `flat` begins.
    """
    ones = (1,) * len(offset)
    if len(shape) == 1:
        yield Shard(name, flat.view(*ones, flat.numel()), full_shape, (*offset, begin))
        return
    row = math.prod(shape[1:])
    end = begin + flat.numel()
    # Rows `first` to `last` - 1 are complete. If first > last, the range lies inside a single row.
    first, last = -(-begin // row), end // row
    if first > last:
        yield from _boxes(name, flat, full_shape, shape[1:], begin - last * row, (*offset, last))
        return
    if head := first * row - begin:
        yield from _boxes(name, flat[:head], full_shape, shape[1:], row - head, (*offset, first - 1))
    if last > first:
        rows = flat[head : head + (last - first) * row].view(*ones, last - first, *shape[1:])
        yield Shard(name, rows, full_shape, (*offset, first, *(0,) * (len(shape) - 1)))
    if tail := end - last * row:
        yield from _boxes(name, flat[flat.numel() - tail :], full_shape, shape[1:], 0, (*offset, last))
