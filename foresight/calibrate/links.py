"""Time the collectives of the present world, by the groups that a split may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gptscale.foresight.calibrate.file import Operation
from gptscale.foresight.calibrate.timing import Timing, timings

# Bytes of the sweep: 4 KiB to 64 MiB.
SIZES = tuple(2**n for n in range(12, 27, 2))
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")


def time_collectives(
    sizes: Iterable[int], world_size: int, per_node: int, device: torch.device, repeats: int
) -> dict[Operation, Timing]:
    """Return the seconds of each collective at each size, which is that of the whole tensor.

    Its shape is the bytes, the ranks, and how many of them are on a node. The groups of a split are measured as they run: all of
    one kind at the same time, so that those that leave a node share its links.
    """
    groups = {
        shape: _group(shape[0], stride, world_size) for shape, stride in group_shapes(world_size, per_node).items()
    }
    calls: dict[Operation, Callable[[], object]] = {}
    for size in sizes:
        for (ranks, on_node), group in groups.items():
            for kind in COLLECTIVES:
                calls[Operation(kind, (size, ranks, on_node))] = collective(kind, size, device, group)
        for on_node in {2, 1} if per_node < world_size else {2}:
            stride = 1 if on_node == 2 else per_node
            calls[Operation("send", (size, 2, on_node))] = _message(size, world_size, stride, device)
    # A send goes there and comes back.
    halves = {"send": 0.5}
    return {
        operation: timing._replace(seconds=timing.seconds * halves.get(operation.kind, 1.0))
        for operation, timing in timings(calls, device, repeats).items()
    }


def group_shapes(world_size: int, per_node: int) -> dict[tuple[int, int], int]:
    """Return how far apart the ranks of a group lie, by their number and how many of them are on a node."""
    shapes: dict[tuple[int, int], int] = {}
    for ranks in range(2, world_size + 1):
        for stride in range(1, world_size // ranks + 1):
            if world_size % (ranks * stride) == 0:
                shapes.setdefault((ranks, min(ranks, -(-per_node // stride))), stride)
    return shapes


def _group(ranks: int, stride: int, world_size: int) -> dist.ProcessGroup:
    """Return this rank's group of ranks that lie `stride` apart. Every rank makes all of them."""
    firsts = [block + i for block in range(0, world_size, ranks * stride) for i in range(stride)]
    members = [[first + stride * i for i in range(ranks)] for first in firsts]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members)[0]  # type: ignore[assignment]
    return group


def collective(kind: str, n_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a call of a collective of a group on a tensor of fp32 numbers."""
    part = torch.zeros(max(1, n_bytes // 4 // group.size()), device=device)
    full = part.new_zeros(part.numel() * group.size())
    if kind == "all-reduce":
        return lambda: dist.all_reduce(full, group=group)
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(full, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, full, group=group)


def _message(n_bytes: int, world_size: int, stride: int, device: torch.device) -> Callable[[], object]:
    """Return a message from each first rank of a pair to the other, `stride` further, and back."""
    tensor, rank = torch.zeros(max(1, n_bytes // 4), device=device), dist.get_rank()
    is_first = rank // stride % 2 == 0
    other = rank + stride if is_first else rank - stride
    # With an odd number the last has nobody to send to.
    return partial(_there_and_back, tensor, is_first, other) if other < world_size else lambda: None


def _there_and_back(tensor: Tensor, is_first: bool, other: int) -> None:
    if is_first:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    else:
        dist.recv(tensor, other)
        dist.send(tensor, other)
