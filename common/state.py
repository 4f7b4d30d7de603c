"""Named boxes of training state: how every recipe describes the tensors it holds, whatever their layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Shard(NamedTuple):
    """One box of one named tensor of the training state, as this process holds it.

    name: the same in every recipe, for example `model/blocks.0.attn.qkv.weight` or `adamw.exp_avg/wte.weight`.
    tensor: the live local tensor; loading copies into it.
    shape: the shape of the whole tensor. offset: where `tensor` begins in it, per dim.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices that cut this box out of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


# tensor name, offset, shape
Box = tuple[str, tuple[int, ...], tuple[int, ...]]


def box_of(shard: Shard) -> Box:
    """Return which part of which tensor a shard is, whatever it holds."""
    return shard.name, tuple(shard.offset), tuple(shard.tensor.shape)


def holders(boxes_of_ranks: Iterable[Iterable[Box]]) -> dict[Box, list[int]]:
    """Return the ranks that hold each box."""
    ranks_of: dict[Box, list[int]] = {}
    for rank, boxes in enumerate(boxes_of_ranks):
        for box in boxes:
            ranks_of.setdefault(box, []).append(rank)
    return ranks_of


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a DTensor."""
    # Importing DTensor takes half a second. A process that has only these two classes does not pay it here.
    if type(tensor) in (Tensor, Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_of(name: str, tensor: Tensor) -> Shard:
    """Return the box that `tensor` covers: all of a plain tensor, this rank's part of a DTensor."""
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Shard(name, local(tensor), shape, (0,) * len(shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    return Shard(name, local(tensor), shape, tuple(offset))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself, detached and sharing the memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_dtensor(tensor) else tensor


def replicas(tensor: Tensor) -> int:
    """Return how many ranks of a DTensor's mesh hold the same values, or 1 for a plain tensor."""
    if not is_dtensor(tensor):
        return 1
    from torch.distributed.tensor import Replicate

    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Replicate))


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds no NaN and no Inf. The least and the greatest number take no memory, and a NaN is both."""
    return not tensor.is_floating_point() or all(bool(end.isfinite()) for end in tensor.aminmax())
