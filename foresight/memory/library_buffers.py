"""Recognise what libraries keep beside torch's optimizers: flat gradients, buckets, weights in half precision.

Their optimizers wrap torch's and hold such tensors in attributes, whose names say what they are.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

# What an attribute's name says, the first that matches. "averaged" and "partition" are DeepSpeed's words for reduced gradients.
NAMES = (
    (re.compile(r"grad|averaged"), "gradient"),
    (re.compile(r"ipg|bucket|buffer"), "bucket"),
    (re.compile(r"fp32|single_partition|master|exp_avg"), "optimizer state"),
    (re.compile(r"bit16|bf16|fp16|lp_|params"), "parameter"),
)
DEPTH = 4
OPTIMIZERS = re.compile(r"(deepspeed|fairscale|colossalai)\..* \w*(ptimizer|Bucket|Store)\w*$")


def library_tensors() -> Iterator[tuple[Tensor, str]]:
    """Yield each tensor that a library's optimizer holds in an attribute whose name is known, with what it is."""
    for holder in _holders():
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            label = next((label for pattern, label in NAMES if pattern.search(name.lower())), None)
            if label is not None:
                yield from zip(_tensors(value, DEPTH), repeat(label))


def _holders() -> list[Any]:
    """Return the live optimizers of libraries: they hold one of torch's, or are named so."""
    return [thing for thing in gc.get_objects() if OPTIMIZERS.match(f"{type(thing).__module__} {type(thing).__name__}")]


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if type(value) in (Tensor, torch.nn.Parameter):
        yield value
    elif depth and isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for inner in value:
            yield from _tensors(inner, depth - 1)
    elif (
        depth
        and str(type(value).__module__).startswith(("deepspeed", "fairscale", "colossalai"))
        and hasattr(value, "__dict__")
    ):
        yield from _tensors(vars(value), depth - 1)
