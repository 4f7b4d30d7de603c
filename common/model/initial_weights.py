"""The initial weights of a model.

A parameter is a pure function of its name, its shape and the seed. Every recipe therefore starts from the same weights, however
it cuts them, and each rank draws only the rows that it holds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gptscale.common.settings.shape import ModelConfig
from gptscale.common.state import Shard

# elements that are drawn at once
INIT_BLOCK = 2**20


def init_tensor(name: str, shape: tuple[int, ...], gpt: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of the parameter `name`, fp32 on the CPU.

    The scheme is that of GPT-2: weights from N(0, 0.02), those of projections into the residual stream divided by
    sqrt(2 n_layer), biases 0, norms 1. The padding rows of tables are 0.
    """
    return torch.cat([rows for _, rows in init_rows(name, shape, gpt, seed, 0, shape[0])])


def init_rows(
    name: str, shape: tuple[int, ...], gpt: ModelConfig, seed: int, begin: int, end: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield rows `begin` to `end` of `init_tensor`, a block at a time, each with the index of its first row.

    A block has at most `INIT_BLOCK` elements, or is one row. Each block has a seed of its own, so that a rank which needs a few
    rows draws only the blocks that they lie in.
    """
    weight, block = gpt.weight(name), max(1, INIT_BLOCK // math.prod(shape[1:]))
    if (given := gpt.given(name)) is not None:
        yield from ((i, given[i : min(i + block, end)]) for i in range(begin, end, block))
        return
    if not weight.is_matrix:
        value = 0.0 if name.endswith("bias") else 1.0
        yield begin, torch.full((end - begin, *shape[1:]), value)
        return
    std = 0.02 / math.sqrt(2 * gpt.n_layer) if weight.cut == "columns" else 0.02
    for first in range(begin // block * block, end, block):
        last = min(first + block, shape[0])
        # The CPU generator of torch uses 32 bits of its seed and drops the rest. A hash brings name, seed and row into them.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {first}".encode()))
        rows = torch.empty(last - first, *shape[1:]).normal_(std=std, generator=generator)
        if weight.cut == "ids":
            rows[max(0, gpt.vocab_size - first) :] = 0
        yield max(begin, first), rows[max(begin, first) - first : min(end, last) - first]


def init_weights(shards: Iterable[Shard], gpt: ModelConfig, seed: int) -> None:
    """Fill each of `shards`, whose names are `model/<parameter>`, with its part of the initial weights."""
    with torch.no_grad():
        for shard in shards:
            row_range, *other_dims = shard.box
            name = shard.name.removeprefix("model/")
            for first, rows in init_rows(name, shard.shape, gpt, seed, row_range.start, row_range.stop):
                destination = shard.tensor[first - row_range.start :][: len(rows)]
                destination.copy_(rows[(slice(None), *other_dims)])
