"""The search for the largest micro-batch that fits: limits of the machine, what is predicted to fit, which batch to try next."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from gptscale.launchers.bench.memory.formula import Need
from gptscale.recipes import get

GIB = 2**30
BATCH_MOST = 2**16  # far beyond any sense
AIMED = 5  # tries, after which halves are surer
CPU_SHARE = 0.5  # of physical memory, the default budget there
CUDA_PROCESS_BYTES = 3 * GIB  # CUDA's libraries before the first tensor of a model: an allowance, not measured
ALLOCATOR = 1.05  # reserved over allocated bytes on CUDA: an allowance for rounding and splitting, not measured


@dataclass(frozen=True)
class Limits:
    """Bytes that a run may take. budget: of the device, on a CPU of the process. host, disk: what is free of them."""

    device_type: str
    budget: float
    host: float
    disk: float

    def lack(self, need: Need, recipe: str) -> str:
        """Which memory is too small for `need`, and by how much; empty if all of it fits."""
        wanted = {"device": (need.device * ALLOCATOR, self.budget), "host": (need.host + CUDA_PROCESS_BYTES, self.host)}
        if self.device_type == "cpu":
            wanted = {"memory": (resident(need, recipe), min(self.budget, self.host))}
        wanted["disk"] = (need.disk, self.disk)
        short = [
            f"{name} lacks {(n - has) / GIB:,.1f} GiB of {n / GIB:,.1f}" for name, (n, has) in wanted.items() if n > has
        ]
        return ", ".join(short)

    def physical(self) -> Limits:
        """The same without a budget on a CPU: beyond them a try would endanger the machine. A GPU refuses by itself."""
        budget = self.host if self.device_type == "cpu" else float("inf")
        return Limits(self.device_type, budget, self.host, self.disk)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a try ended well, within the budget."""
        peak = measured_gib(row, self.device_type)
        return row["status"] == "ok" and peak is not None and peak * GIB <= self.budget


def resident(need: Need, recipe: str) -> float:
    """Bytes of a process on a CPU, where device and host are one memory: the sum of two peaks, at most what it takes."""
    return get(recipe).process_gib * GIB + need.device + need.host


def predicted_gib(need: Need, recipe: str, device_type: str) -> float:
    """What `measured_gib` should come to; on CUDA without what the allocator rounds and splits."""
    return (resident(need, recipe) if device_type == "cpu" else need.device) / GIB


def measured_gib(row: Mapping[str, Any], device_type: str) -> float | None:
    """The peak that a budget is held against: reserved by torch's allocator on CUDA, resident on a CPU."""
    value = row["peak_mem_reserved_gib" if device_type == "cuda" else "peak_rss_gib"]
    return None if value is None or value != value else float(value)


def limits(
    device_type: str, memory_gib: float | None, host_memory_gib: float | None, disk_gib: float | None, files: Path
) -> Limits:
    """This machine's, or what the user says of them; `files`: the folder that zero_infinity would use."""
    memory = psutil.virtual_memory()
    host = memory.available if host_memory_gib is None else host_memory_gib * GIB
    if memory_gib is not None:
        budget = memory_gib * GIB
    elif device_type == "cuda":
        budget = torch.cuda.get_device_properties(0).total_memory
    else:
        budget = CPU_SHARE * memory.total
    exists = next(p for p in (files.absolute(), *files.absolute().parents) if p.exists())
    disk = shutil.disk_usage(exists).free if disk_gib is None else disk_gib * GIB
    return Limits(device_type, float(budget), float(host), float(disk))


def most_that(fits: Callable[[int], bool]) -> int:
    """The largest batch for which `fits`, a falling predicate, holds; 0 if none."""
    low, high = 0, BATCH_MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def next_batch(known: Mapping[int, bool], predicted: int, most: int, aim: int | None = None) -> int | None:
    """The batch to try next, given which of those tried fitted; None once the largest is known to within a sixteenth.

    First the predicted one; then `aim`, the prediction corrected by what was measured, and the nearest beyond it that tells;
    without one, strides of an eighth of the prediction, doubling, until one fits and one does not, then halves. Nothing beyond
    `most`.
    """
    if not known:
        return min(max(1, predicted), most) or None
    low = max((batch for batch, fitted in known.items() if fitted), default=0)
    high = min((batch for batch, fitted in known.items() if not fitted and batch > low), default=None)
    apart, stride = max(1, low // 16), max(1, predicted // 8) << (len(known) - 1)
    if low == most or (high is not None and high - low <= apart):
        return None
    end = most + 1 if high is None else high
    if aim is not None and aim < end and len(known) < AIMED:
        return min(max(aim, low + apart), end - 1)
    if high is None:
        return min(most, low + stride)
    return max(high - stride, high // 4, 1) if low == 0 else (low + high) // 2
