"""Where the weights of a GPT2LMHeadModel, however Colossal-AI cuts it, lie in this package's own tensors.

transformers holds matrices as (in, out), ours are (out, in): a box is a transposed view of the live weight, and loading copies
into it. Rows of our `attn.qkv` are (n_head, 3, head_dim), columns of `c_attn` are (3, n_head, head_dim): each head's query, key
and value are boxes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from gptscale.common.engines.flat_shards import shards_of_range
from gptscale.common.model.hf_weights import name_pairs
from gptscale.common.model.initial_weights import init_tensor
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.state import Shard

# Of our tensors, the dim that Colossal-AI's GPT2Policy cuts over tensor ranks; what is not here is whole on every one of them.
CUT_DIMS = {
    "wte.weight": 0,
    "attn.qkv.weight": 0,
    "attn.qkv.bias": 0,
    "attn.proj.weight": 1,
    "mlp.fc.weight": 0,
    "mlp.fc.bias": 0,
    "mlp.proj.weight": 1,
}


def cut_dim(name: str) -> int | None:
    """The dim of our parameter `name` that is cut over tensor ranks, None if it is whole on each."""
    return next((dim for ending, dim in CUT_DIMS.items() if name.endswith(ending)), None)


def named_parameters(hf: nn.Module, gpt: GPTConfig) -> dict[str, nn.Parameter]:
    """Those parameters of a GPT2LMHeadModel that this process holds, by our names; the tied table is one."""
    ours = {theirs: ours for ours, theirs, _ in name_pairs(gpt.n_layer)} | {"lm_head.weight": "wte.weight"}
    return {ours[theirs]: parameter for theirs, parameter in hf.named_parameters()}


@dataclass(frozen=True)
class TensorLayout:
    """Tensor rank `rank` of `size`; `boxes` is what LibraryOptimizer asks for."""

    gpt: GPTConfig
    rank: int = 0
    size: int = 1

    def boxes(self, name: str, tensor: Tensor) -> Iterator[Shard]:
        """The boxes that `tensor`, laid out as transformers' parameter, is of our tensor `name` (`model/blocks.0...`)."""
        tensor = tensor.detach()
        dim = cut_dim(name)
        if dim is not None and transposed(name, tensor.ndim):
            dim = 1 - dim
        shape = tuple(n * self.size if d == dim else n for d, n in enumerate(tensor.shape))
        parts = tensor.chunk(3, dim=-1) if "attn.qkv." in name else (tensor,)  # a rank's queries, its keys, its values
        for which, part in enumerate(parts):
            offset = [0] * tensor.ndim
            if dim is not None:
                offset[dim] = (which * self.size + self.rank) * part.shape[dim]
            yield from to_ours(Shard(name, part, shape, tuple(offset)), self.gpt)


@dataclass(frozen=True)
class FlatLayout:
    """Ranges of flattened parameters. ranges: of each, by our name, its shape and the element that the range begins with."""

    gpt: GPTConfig
    ranges: dict[str, tuple[tuple[int, ...], int]]

    def boxes(self, name: str, flat: Tensor) -> Iterator[Shard]:
        """The boxes that `flat`, 1-D, is of our tensor `name`; what lies behind the parameter's end is padding."""
        shape, begin = self.ranges[name.partition("/")[2]]
        numel = max(0, min(flat.numel(), torch.Size(shape).numel() - begin))
        for shard in shards_of_range(name, flat[:numel], shape, begin):
            yield from to_ours(shard, self.gpt)


def transposed(name: str, ndim: int) -> bool:
    """Whether our tensor is the transpose of transformers'."""
    return ndim == 2 and (".attn." in name or ".mlp." in name)


def to_ours(theirs: Shard, gpt: GPTConfig) -> Iterator[Shard]:
    """A box of transformers' tensor as boxes of ours, views of the same memory."""
    name, tensor, shape, offset = theirs
    if "attn.qkv." not in name:
        if transposed(name, tensor.ndim):
            yield Shard(name, tensor.t(), shape[::-1], offset[::-1])
        else:
            yield theirs
        return
    begin, end = offset[-1], offset[-1] + tensor.shape[-1]
    while begin < end:  # a head's query, key or value at a time
        which, head = divmod(begin // gpt.head_dim, gpt.n_head)
        row, n = begin % gpt.head_dim, min(end - begin, gpt.head_dim - begin % gpt.head_dim)
        part = tensor[..., begin - offset[-1] : begin - offset[-1] + n]
        at = (head * 3 + which) * gpt.head_dim + row
        yield Shard(name, part.t() if part.ndim == 2 else part, shape[::-1], (at, *offset[:-1]))
        begin += n


def fill(boxes: Iterable[Shard], gpt: GPTConfig, seed: int) -> None:
    """The initial weights of `seed` into boxes `model/<name>`, a tensor's one after another; one whole tensor at a time."""
    with torch.no_grad():
        for name, group in groupby(boxes, key=lambda shard: shard.name):
            parts = list(group)
            whole = init_tensor(name.removeprefix("model/"), parts[0].shape, gpt, seed)
            for part in parts:
                part.tensor.copy_(whole[part.box])
