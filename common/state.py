"""Named boxes of training state: how every recipe describes what it holds, whatever its layout."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """One box of one named tensor of the training state, as this process holds it.

    name: canonical, the same in every recipe, e.g. `model/blocks.0.attn.qkv.weight`, `adamw.exp_avg/wte.weight`.
    tensor: the live local tensor; loading copies into it.
    shape: of the whole tensor. offset: where `tensor` begins in it, per dim.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
