"""Time collectives of the present world, and what computing and communicating at once costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gptscale.common.measure.speed import timed
from gptscale.foresight.calibrate.file import MachineFact
from gptscale.foresight.calibrate.timing import Timing, meet, summary, timings
from gptscale.foresight.time.operations import MessageShape, message_shape
from gptscale.foresight.time.work import Operation

# Bytes of the sweep: 4 KiB to 64 MiB.
SIZES = tuple(2**n for n in range(12, 27, 2))
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
# The same collectives by the names that steps of pipelines have for those of gradients and weights.
OTHER_NAMES = {
    "all-reduce": ("gradient all-reduce",),
    "all-gather": ("weight all-gather",),
    "reduce-scatter": ("gradient reduce-scatter",),
}
COMPUTING, COMMUNICATING = "contention of computing", "contention of communicating"
# A product that fits a cache, as those of blocks do, and a message that lasts many of them.
SIDE, BESIDE_BYTES, MESSAGES = 256, 2**22, 4


def time_collectives(
    sizes: Iterable[int], world_size: int, per_node: int, device: torch.device, link: str, repeats: int
) -> dict[Operation, Timing]:
    """Return the seconds of each collective at each size, which is that of the whole tensor.

    The groups of a split are measured as they run: all of one kind at the same time, so that those that leave a node share its
    links.
    """
    groups = {(n, stride): _group(n, stride, world_size) for n, stride in group_sizes(world_size, per_node)}
    calls: dict[Operation, Callable[[], object]] = {}
    for size in sizes:
        for (ranks, stride), group in groups.items():
            shape = message_shape(size, ranks, stride, per_node)
            calls |= {Operation(kind, shape, link): collective(kind, size, device, group) for kind in COLLECTIVES}
        for stride in {1, per_node} if per_node < world_size else {1}:
            sharing = 1 if stride < per_node else per_node
            shape = MessageShape(size, 2, 1 + (stride < per_node), sharing)
            calls[Operation("send", shape, link)] = _message(size, world_size, stride, device)
    result: dict[Operation, Timing] = {}
    for operation, timing in timings(calls, device, repeats).items():
        # A send goes there and comes back.
        seconds = timing._replace(seconds=timing.seconds / 2) if operation.kind == "send" else timing
        for name in (operation.kind, *OTHER_NAMES.get(operation.kind, ())):
            result[operation._replace(kind=name)] = seconds
    return result


def group_sizes(world_size: int, per_node: int) -> list[tuple[int, int]]:
    """Return ranks and stride of the groups that differ for the links: neighbours, and those with the same place on nodes."""
    shapes: dict[MessageShape, tuple[int, int]] = {}
    for ranks in range(2, world_size + 1):
        for stride in range(1, world_size // ranks + 1):
            if world_size % (ranks * stride) == 0:
                shapes.setdefault(message_shape(0, ranks, stride, per_node), (ranks, stride))
    return list(shapes.values())


def _group(ranks: int, stride: int, world_size: int) -> dist.ProcessGroup:
    """Return this rank's group. Every rank makes all of them."""
    firsts = [block + i for block in range(0, world_size, ranks * stride) for i in range(stride)]
    members = [[first + stride * i for i in range(ranks)] for first in firsts]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members)[0]
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


def contention(device: torch.device, repeats: int) -> list[MachineFact]:
    """Return how many times longer products last beside running all-reduces, and all-reduces beside products."""
    full = [torch.zeros(BESIDE_BYTES // 4, device=device) for _ in range(MESSAGES)]
    side = SIDE if device.type == "cpu" else 16 * SIDE
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)

    def reduce_all() -> list[dist.Work]:
        return [dist.all_reduce(tensor, async_op=True) for tensor in full]

    def alone() -> None:
        for work in reduce_all():
            work.wait()

    samples: dict[str, list[float]] = {COMPUTING: [], COMMUNICATING: []}
    alone()
    for _ in range(repeats):
        meet()
        sent_s = timed(alone, 1, device)
        meet()
        product_s = timed(lambda: a @ b, 20, device)
        meet()
        began = time.perf_counter()
        works, n = reduce_all(), 0
        while not all(work.is_completed() for work in works):
            a @ b
            n += 1
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        both_s = time.perf_counter() - began
        for work in works:
            work.wait()
        samples[COMPUTING].append(both_s / max(n, 1) / product_s)
        samples[COMMUNICATING].append(both_s / sent_s)
    facts = summary(samples)
    return [MachineFact(name, max(1.0, timing.seconds), "times", timing.spread) for name, timing in facts.items()]
