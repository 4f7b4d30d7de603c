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
from gptscale.foresight.time.operations import MessageShape
from gptscale.foresight.time.work import Operation

# Bytes of the sweep: 4 KiB to 64 MiB.
SIZES = tuple(2**n for n in range(12, 27, 2))
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "send")
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
    """Return the seconds of each collective of all ranks at each size. The size is that of the whole tensor."""
    calls = {(kind, size): collective(kind, size, world_size, device) for kind in COLLECTIVES for size in sizes}
    measured = timings(calls, device, repeats)
    result = {}
    for (kind, size), timing in measured.items():
        # A send goes there and comes back. It joins two ranks, neighbours.
        ranks = 2 if kind == "send" else world_size
        shape = MessageShape(size, ranks, min(ranks, per_node), 1)
        seconds = timing._replace(seconds=timing.seconds / 2) if kind == "send" else timing
        for name in (kind, *OTHER_NAMES.get(kind, ())):
            result[Operation(name, shape, link)] = seconds
    return result


def collective(kind: str, n_bytes: int, world_size: int, device: torch.device) -> Callable[[], object]:
    """Return a call of a collective of all ranks on a tensor of fp32 numbers."""
    part = torch.zeros(max(1, n_bytes // 4 // world_size), device=device)
    whole = part.new_zeros(part.numel() * world_size)
    if kind == "all-reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if kind == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    rank = dist.get_rank()
    other = rank ^ 1
    # With an odd number of ranks the last has nobody to send to.
    return partial(_there_and_back, whole, rank, other) if other < world_size else lambda: None


def _there_and_back(tensor: Tensor, rank: int, other: int) -> None:
    if rank < other:
        dist.send(tensor, other)
        dist.recv(tensor, other)
    else:
        dist.recv(tensor, other)
        dist.send(tensor, other)


def contention(device: torch.device, repeats: int) -> list[MachineFact]:
    """Return how many times longer products last beside running all-reduces, and all-reduces beside products."""
    whole = [torch.zeros(BESIDE_BYTES // 4, device=device) for _ in range(MESSAGES)]
    side = SIDE if device.type == "cpu" else 16 * SIDE
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)

    def reduce_all() -> list[dist.Work]:
        return [dist.all_reduce(tensor, async_op=True) for tensor in whole]

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
