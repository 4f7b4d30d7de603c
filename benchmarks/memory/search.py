"""The search for the largest micro-batch that fits: limits of the machine, predicted peaks, which batch to try next."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from gptscale.recipes import get

GIB = 2**30
# far beyond any batch that makes sense
BATCH_MOST = 2**16
# tries that follow the prediction; after them halves are surer
AIMED = 5
# share of physical memory that is the default budget on a CPU
CPU_SHARE = 0.5
# CUDA's libraries before the first tensor of a model: an allowance, not measured
CUDA_PROCESS_BYTES = 3 * GIB
# reserved over allocated bytes on CUDA: an allowance for rounding and splitting, not measured
ALLOCATOR = 1.05


class WayToFit(NamedTuple):
    """How a model is made to fit: a recipe, what its blocks keep for backward, and the moments' precision."""

    recipe: str
    activation_checkpointing: str = "full"
    optimizer_state: str = "fp32"

    def __str__(self) -> str:
        return "/".join(self)


class Need(NamedTuple):
    """Bytes of one process, whose device and host are one memory on a CPU."""

    device: float
    host: float
    disk: float


@dataclass(frozen=True)
class Limits:
    """Bytes that a run may take.

    budget: of the device, on a CPU of the process. host, disk: what is free of them.
    """

    device_type: str
    budget: float
    host: float
    disk: float

    def lack(self, need: Need, recipe: str) -> str:
        """Return which memory is too small for `need`, and by how much, or nothing if all of it fits."""
        if self.device_type == "cpu":
            needs = {"memory": (resident(need, recipe), min(self.budget, self.host))}
        else:
            needs = {
                "device": (need.device * ALLOCATOR, self.budget),
                "host": (need.host + CUDA_PROCESS_BYTES, self.host),
            }
        needs["disk"] = (need.disk, self.disk)
        return ", ".join(
            f"{name} lacks {(nbytes - free) / GIB:,.1f} GiB of {nbytes / GIB:,.1f}"
            for name, (nbytes, free) in needs.items()
            if nbytes > free
        )

    def physical(self) -> Limits:
        """Return the limits of the machine itself, beyond which a try would endanger it, without the user's budget.

        A GPU has none, because it refuses by itself.
        """
        budget = self.host if self.device_type == "cpu" else float("inf")
        return Limits(self.device_type, budget, self.host, self.disk)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a try ended well, within the budget."""
        peak = measured_gib(row, self.device_type)
        return row["status"] == "ok" and peak is not None and peak * GIB <= self.budget


def resident(need: Need, recipe: str) -> float:
    """Return the bytes of a process on a CPU, where device and host are one memory.

    It is the sum of two peaks, which is at least what the process takes.
    """
    return get(recipe).process_gib * GIB + need.device + need.host


def predicted_gib(need: Need, recipe: str, device_type: str) -> float:
    """Return what `measured_gib` should come to, on CUDA without what the allocator rounds and splits."""
    return (resident(need, recipe) if device_type == "cpu" else need.device) / GIB


def measured_gib(row: Mapping[str, Any], device_type: str) -> float | None:
    """Return the peak that is compared with the budget: reserved by torch's allocator on CUDA, resident on a CPU.

    None where the row has no such peak: the cell is empty, which is NaN in a frame.
    """
    value = row["peak_mem_reserved_gib" if device_type == "cuda" else "peak_rss_gib"]
    return None if value is None or value != value else float(value)


def limits(
    device_type: str, memory_gib: float | None, host_memory_gib: float | None, disk_gib: float | None, files: Path
) -> Limits:
    """Return this machine's limits, or what the user says of them.

    files: the folder that zero_infinity would use.
    """
    memory = psutil.virtual_memory()
    host = memory.available if host_memory_gib is None else host_memory_gib * GIB
    if memory_gib is not None:
        budget = memory_gib * GIB
    elif device_type == "cuda":
        budget = torch.cuda.get_device_properties(0).total_memory
    else:
        budget = CPU_SHARE * memory.total
    folder = next(p for p in (files.absolute(), *files.absolute().parents) if p.exists())
    disk = shutil.disk_usage(folder).free if disk_gib is None else disk_gib * GIB
    return Limits(device_type, float(budget), float(host), float(disk))


def largest_batch(fits: Callable[[int], bool]) -> int:
    """Return the largest batch for which `fits` holds, or 0 if there is none.

    It must hold for all smaller batches too.
    """
    low, high = 0, BATCH_MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def next_batch(fitted: Mapping[int, bool], predicted: int, most: int, aim: int | None = None) -> int | None:
    """Return the batch to try next, or None once the largest is known to within a sixteenth.

    fitted: which of the batches tried fitted. The first try is `predicted`. Then follows `aim`, the prediction corrected by what
    was measured, and the nearest batch beyond it that narrows the range. Without an aim strides of an eighth of the prediction
    follow, doubling until one fits and one does not, then halves. Nothing is tried beyond `most`.
    """
    if not fitted:
        return min(max(1, predicted), most) or None
    low = max((batch for batch, fits in fitted.items() if fits), default=0)
    high = min((batch for batch, fits in fitted.items() if not fits and batch > low), default=None)
    apart, stride = max(1, low // 16), max(1, predicted // 8) << (len(fitted) - 1)
    if low == most or (high is not None and high - low <= apart):
        return None
    end = most + 1 if high is None else high
    if aim is not None and aim < end and len(fitted) < AIMED:
        return min(max(aim, low + apart), end - 1)
    if high is None:
        return min(most, low + stride)
    return max(high - stride, high // 4, 1) if low == 0 else (low + high) // 2
