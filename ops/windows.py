"""Windows that slide over height and width: their arguments checked by name, and how many of them fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]


def pair(name: str, value: Any, least: int) -> Pair:
    """`value` for height and width: one int for both, or two; TypeError or ValueError unless each is at least `least`."""
    if type(value) is int and value >= least:  # almost always, and this runs at every call
        return value, value
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2:
        raise ValueError(f"{name}: one int or two expected, not {value!r}")
    for one in both:
        if isinstance(one, bool) or not isinstance(one, int):
            raise TypeError(f"{name}: one int or two expected, not {value!r}")
        if one < least:
            raise ValueError(f"{name}: at least {least} expected, not {value!r}")
    return both


def windows_along(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool = False) -> int:
    """How many windows fit along a dimension: floor((length + 2 padding - dilation (kernel - 1) - 1) / stride) + 1.

    With ceil_mode the quotient is rounded up, but no window starts beyond the input and its leading padding (as
    torch.nn.MaxPool2d documents it).
    """
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    count = (room + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= length + padding else count


def windows_over(
    size: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool = False
) -> Pair:
    """Height and width of the output, from the last two sizes of input and kernel."""
    return (
        windows_along(size[-2], kernel[-2], stride[0], padding[0], dilation[0], ceil_mode),
        windows_along(size[-1], kernel[-1], stride[1], padding[1], dilation[1], ceil_mode),
    )


def memory_format(x: Tensor) -> torch.memory_format:
    """channels_last if x (4 dimensions) lies so in memory and not in the usual order as well, else contiguous."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
