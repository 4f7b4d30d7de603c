"""The weights of a GPT2LMHeadModel as boxes of this package's tensors, however Colossal-AI cuts the model.

transformers keeps matrices as (in, out), this package as (out, in). So a box is a transposed view of the live weight, and
loading copies into it. The rows of `attn.qkv` here are (n_head, 3, head_dim), the columns of `c_attn` there (3, n_head,
head_dim). So the query, the key and the value of each head are boxes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from gptscale.common.engines.flat_shards import shards_of_range
from gptscale.common.model.hf_gpt2 import QKV, is_transposed
from gptscale.common.model.initial_weights import init_tensor
from gptscale.common.settings.shape import CUT_DIMS, TABLE, ModelConfig
from gptscale.common.state import Shard


def cut_dim(name: str, gpt: ModelConfig) -> int | None:
    """Return the dim of our parameter `name` that GPT2Policy cuts over tensor ranks, or None if every rank has all of it."""
    cut = gpt.weight(name).cut
    return None if cut == "positions" else CUT_DIMS[cut]


def named_parameters(hf: nn.Module, gpt: ModelConfig) -> dict[str, nn.Parameter]:
    """Return the parameters of a GPT2LMHeadModel on this process by our names, the tied table once."""
    our_names = {hf_name: name for _, name, hf_name in gpt.parameters()} | {"lm_head.weight": TABLE}
    return {our_names[hf_name]: parameter for hf_name, parameter in hf.named_parameters()}


@dataclass(frozen=True)
class TensorLayout:
    """The layout of the weights on tensor rank `rank` of `size`, whose `boxes` LibraryOptimizer calls."""

    gpt: ModelConfig
    rank: int = 0
    size: int = 1

    def boxes(self, name: str, tensor: Tensor) -> Iterator[Shard]:
        """Yield the boxes of our tensor `name` (`model/blocks.0...`) that `tensor`, laid out as in transformers, covers."""
        tensor = tensor.detach()
        dim = cut_dim(own_name(name), self.gpt)
        if dim is not None and is_transposed(self.gpt.weight(own_name(name))):
            dim = 1 - dim
        shape = tuple(n * self.size if d == dim else n for d, n in enumerate(tensor.shape))
        # A rank's queries, its keys and its values lie one after another.
        parts = tensor.chunk(3, dim=-1) if QKV in name else (tensor,)
        for which, part in enumerate(parts):
            offset = [0] * tensor.ndim
            if dim is not None:
                offset[dim] = (which * self.size + self.rank) * part.shape[dim]
            yield from to_ours(Shard(name, part, shape, tuple(offset)), self.gpt)


@dataclass(frozen=True)
class FlatLayout:
    """The layout of ranges of flattened parameters.

    ranges: for each parameter, by our name, its shape and the first element of its range.
    """

    gpt: ModelConfig
    ranges: dict[str, tuple[tuple[int, ...], int]]

    def boxes(self, name: str, flat: Tensor) -> Iterator[Shard]:
        """Yield the boxes of our tensor `name` that `flat`, 1-D, covers, leaving out the padding behind the parameter's end."""
        shape, begin = self.ranges[own_name(name)]
        numel = max(0, min(flat.numel(), torch.Size(shape).numel() - begin))
        for shard in shards_of_range(name, flat[:numel], shape, begin):
            yield from to_ours(shard, self.gpt)


def own_name(name: str) -> str:
    """Return the parameter's name in the name of a tensor of its state (`model/...`, `adamw.exp_avg/...`)."""
    return name.partition("/")[2]


def to_ours(hf_shard: Shard, gpt: ModelConfig) -> Iterator[Shard]:
    """Yield the boxes of our tensor that a box of transformers' tensor covers, as views of the same memory."""
    name, tensor, shape, offset = hf_shard
    if QKV not in name:
        if is_transposed(gpt.weight(own_name(name))):
            yield Shard(name, tensor.t(), shape[::-1], offset[::-1])
        else:
            yield hf_shard
        return
    begin, end = offset[-1], offset[-1] + tensor.shape[-1]
    # One head's query, key or value at a time.
    while begin < end:
        which, head = divmod(begin // gpt.head_dim, gpt.n_head)
        row, n = begin % gpt.head_dim, min(end - begin, gpt.head_dim - begin % gpt.head_dim)
        part = tensor[..., begin - offset[-1] : begin - offset[-1] + n]
        our_row = (head * 3 + which) * gpt.head_dim + row
        yield Shard(name, part.t() if part.ndim == 2 else part, shape[::-1], (our_row, *offset[:-1]))
        begin += n


def fill(state: Iterable[Shard], gpt: ModelConfig, seed: int) -> None:
    """Write the initial weights of `seed` into the boxes `model/<name>`, with one whole tensor in memory at a time.

    The boxes of a tensor must follow each other.
    """
    weights = (shard for shard in state if shard.name.startswith("model/"))
    with torch.no_grad():
        for name, group in groupby(weights, key=lambda shard: shard.name):
            parts = list(group)
            full = init_tensor(name.removeprefix("model/"), parts[0].shape, gpt, seed)
            for part in parts:
                part.tensor.copy_(full[part.box])
