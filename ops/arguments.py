"""Checks that every operator makes on its arguments before any implementation runs.

They raise a TypeError or a ValueError that names the argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a strided tensor of one of the four floating-point types."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: a Tensor expected, not {type(value).__name__}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name}: fp32, fp64, bf16 or fp16 expected, not {value.dtype} (shape {tuple(value.shape)})")
    if value.layout is not torch.strided:
        raise TypeError(f"{name}: a dense tensor expected, not {value.layout} (shape {tuple(value.shape)})")


def check_like(name: str, value: Any, other_name: str, other: Tensor) -> None:
    """Check a tensor as `check_tensor` does, and that its device and dtype are those of `other`.

    Where autocast is enabled the dtypes may differ, because autocast is going to make them equal.
    """
    check_tensor(name, value)
    if value.device != other.device:
        raise ValueError(f"{name}: on {value.device}, but {other_name} is on {other.device}")
    if value.dtype != other.dtype and not torch.is_autocast_enabled(other.device.type):
        raise TypeError(f"{name}: {other.dtype} expected, as {other_name} has, not {value.dtype}")


def check_shape(name: str, value: Tensor, shape: tuple[int, ...], why: str) -> None:
    """Raise ValueError unless `value` has exactly this shape."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: shape {shape} expected, {why}, not {tuple(value.shape)}")
