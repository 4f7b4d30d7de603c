"""Windows that slide over height and width: checks of their arguments, and how many of them fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]


def pair(name: str, value: Any, least: int) -> Pair:
    """Return `value` as a pair for height and width, where one int stands for both.

    Raises TypeError or ValueError unless both are ints of at least `least`.
    """
    # This is the usual case, and the function runs at every call of an operator.
    if type(value) is int and value >= least:
        return value, value
    height_and_width = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(height_and_width) != 2:
        raise ValueError(f"{name}: one int or two expected, not {value!r}")
    for number in height_and_width:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name}: one int or two expected, not {value!r}")
        if number < least:
            raise ValueError(f"{name}: at least {least} expected, not {value!r}")
    return height_and_width


def windows_along(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool = False) -> int:
    """Return how many windows fit along a dimension.

    That is floor((length + 2 padding - dilation (kernel - 1) - 1) / stride) + 1. With ceil_mode the quotient is rounded up,
    but no window starts beyond the input and its leading padding, as torch.nn.MaxPool2d documents it.
    """
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    count = (room + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= length + padding else count


def windows_over(
    size: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool = False
) -> Pair:
    """Return height and width of the output, from the last two sizes of input and kernel."""
    return (
        windows_along(size[-2], kernel[-2], stride[0], padding[0], dilation[0], ceil_mode),
        windows_along(size[-1], kernel[-1], stride[1], padding[1], dilation[1], ceil_mode),
    )


def constants(kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair) -> dict[str, int]:
    """Return a geometry as the constants of a Triton kernel: KERNEL_H, KERNEL_W, STRIDE_H ..."""
    pairs = {"KERNEL": kernel, "STRIDE": stride, "PADDING": padding, "DILATION": dilation}
    return {f"{name}_{axis}": pair[k] for name, pair in pairs.items() for k, axis in enumerate("HW")}


def memory_format(x: Tensor) -> torch.memory_format:
    """Return channels_last if x has 4 dimensions and only that layout, else contiguous.

    A tensor can have both layouts at once, for example with a single channel. It counts as contiguous.
    """
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
