"""What a run takes while it trains: memory, and how busy device and processor are, as nvidia-smi and top would show it.

A thread asks ten times a second. Asked once per step, between two steps, the allocator would always answer at the moment when
activations are freed, and the mean would be that of weights and optimizer state alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import TracebackType

import psutil
import pynvml
import torch

from gptscale.common.measure.devices import nvml_handle
from gptscale.results.record.files import warn

INTERVAL_S = 0.1
GIB = 2**30
Reader = Callable[[], float]


@dataclass(frozen=True)
class Usage:
    """Means over the time of a UsageSampler, in the columns of lenet.csv; None where this machine has no such figure.

    avg_mem_gib: what tensors took on the GPU, or without one the resident set of this process. gpu_util_percent: share of the
    time in which a kernel ran. gpu_mem_used_gib: of the whole GPU, other programs and the CUDA context included. power_w: of
    the GPU. cpu_util_percent: this process's, without its workers; 100 is one core.
    """

    avg_mem_gib: float | None = None
    gpu_util_percent: float | None = None
    gpu_mem_used_gib: float | None = None
    power_w: float | None = None
    cpu_util_percent: float | None = None


def over_ranks(usages: Sequence[Usage]) -> dict[str, float | None]:
    """One row of all ranks' figures: the highest avg_mem_gib, as the peaks are, and the means of the others."""
    row: dict[str, float | None] = {}
    for field in fields(Usage):
        known = [value for usage in usages if (value := getattr(usage, field.name)) is not None]
        together = (
            max(known, default=None) if field.name == "avg_mem_gib" else sum(known) / len(known) if known else None
        )
        row[field.name] = together
    return row


class UsageSampler:
    """Samples from `with` to its end, and at both of them; `usage()` at any time."""

    def __init__(self, device: torch.device, interval_s: float = INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._readers = {"avg_mem_gib": memory_reader(device), **nvml_readers(device)}
        self._sums: dict[str, tuple[float, int]] = dict.fromkeys(self._readers, (0.0, 0))
        self._cpu_util_percent: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)

    def __enter__(self) -> UsageSampler:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()
        wall_s = time.perf_counter() - self._began
        self._cpu_util_percent = 100 * (time.process_time() - self._cpu_began) / wall_s

    def _watch(self) -> None:
        while not self._ended.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        for name, read in list(self._readers.items()):
            try:
                value = read()
            except pynvml.NVMLError as error:  # not every GPU tells everything, its power for example
                warn(f"{name} is not sampled any more (NVML: {error})")
                del self._readers[name]
                continue
            total, n = self._sums[name]
            self._sums[name] = (total + value, n + 1)

    def usage(self) -> Usage:
        """Means so far; what never was told is None."""
        means = {name: total / n for name, (total, n) in self._sums.items() if n}
        return Usage(**means, cpu_util_percent=self._cpu_util_percent)


def memory_reader(device: torch.device) -> Reader:
    """Reads what tensors take on a GPU as the allocator counts it, else the resident set; GiB.

    The allocator counts when work is queued, which runs ahead of the GPU: while the host waits for the device, it has freed
    the step's activations already, so that on a GPU that is the bottleneck the mean is a lower bound.
    """
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device) / GIB
    process = psutil.Process()
    return lambda: process.memory_info().rss / GIB


def nvml_readers(device: torch.device) -> dict[str, Reader]:
    """What NVML tells of a GPU by column; nothing without one, and nothing but a warning where NVML cannot be asked."""
    if device.type != "cuda":
        return {}
    try:
        handle = nvml_handle(device)
    except pynvml.NVMLError as error:
        warn(f"utilisation, memory in use and power of the GPU are not sampled (NVML: {error})")
        return {}
    return {
        "gpu_util_percent": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "gpu_mem_used_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
    }
