"""Named boxes of training state: how every recipe describes what it holds, whatever its layout."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices that cut this box out of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


def shard_of(name: str, tensor: Tensor) -> Shard:
    """The box that a plain tensor (all of it) or a DTensor (this rank's part) is."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Shard(name, local(tensor), shape, (0,) * len(shape))
    _, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Shard(name, local(tensor), shape, tuple(offset))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor as it is. Both detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def replicas(tensor: Tensor) -> int:
    """How many ranks of its mesh hold the same values as this one: 1 for a tensor that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))
