"""The initial weights of a GPT: a pure function of the parameter's name, its shape and the seed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.state import Shard

INIT_BLOCK = 2**20  # elements drawn at once


def init_tensor(name: str, shape: tuple[int, ...], gpt: GPTConfig, seed: int) -> Tensor:
    """The initial value (fp32, CPU) of the parameter `name`: a pure function of name, shape and seed.

    So every recipe starts from the same weights however it cuts them. GPT-2's scheme: N(0, 0.02), projections into the
    residual stream scaled by 1/sqrt(2 n_layer), biases 0, norms 1, and 0 for the table's padding rows.
    """
    return torch.cat([rows for _, rows in init_rows(name, shape, gpt, seed, 0, shape[0])])


def init_rows(
    name: str, shape: tuple[int, ...], gpt: GPTConfig, seed: int, begin: int, end: int
) -> Iterator[tuple[int, Tensor]]:
    """Rows `begin` to `end` of `init_tensor`, a block of at most `INIT_BLOCK` elements (or one row) at a time, each with
    the index of its first row. Every block is drawn by itself, so that a shard costs what it holds and nothing more.
    """
    if name.endswith("bias") or "ln_" in name:
        yield begin, torch.full((end - begin, *shape[1:]), float(not name.endswith("bias")))
        return
    std = 0.02 / math.sqrt(2 * gpt.n_layer) if name.endswith("proj.weight") else 0.02
    block = max(1, INIT_BLOCK // math.prod(shape[1:]))
    for first in range(begin // block * block, end, block):
        last = min(first + block, shape[0])
        # torch's CPU generator takes 32 bits of a seed and drops the rest: hash all into them
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name} {first}".encode()))
        value = torch.empty(last - first, *shape[1:]).normal_(std=std, generator=generator)
        if name == "wte.weight":
            value[max(0, gpt.vocab_size - first) :] = 0
        yield max(begin, first), value[max(begin, first) - first : min(end, last) - first]


def init_weights(shards: Iterable[Shard], gpt: GPTConfig, seed: int) -> None:
    """Fill the boxes `model/<name>` with their part of the initial weights."""
    with torch.no_grad():
        for shard in shards:
            rows, *rest = shard.box
            name = shard.name.removeprefix("model/")
            for begin, value in init_rows(name, shard.shape, gpt, seed, rows.start, rows.stop):
                shard.tensor[begin - rows.start :][: len(value)].copy_(value[(slice(None), *rest)])
