"""The memory that a run uses, and how busy its device and processor are, as nvidia-smi and top would show it.

A thread samples ten times a second. A sample once per step, between two steps, would always fall at the moment when activations
are freed, and its mean would be that of weights and optimizer state alone.

Usage has a mean for each column of the results that this machine can fill. avg_mem_gib: memory of tensors on the GPU, or without
a GPU the resident set of this process. gpu_util_percent: share of the time in which a kernel ran. gpu_mem_used_gib: memory in use
on the whole GPU, with other programs and the CUDA context. power_w: power of the GPU. cpu_util_percent: processor time of this
process without its workers, where 100 is one core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from statistics import fmean

import psutil
import pynvml
import torch

from gptscale.common.measure.devices import nvml_handle
from gptscale.results.record.files import warn

INTERVAL_S = 0.1
GIB = 2**30
Reader = Callable[[], float]
Usage = dict[str, float]


def over_ranks(usages: Sequence[Usage]) -> Usage:
    """Return one row of all ranks' figures: the highest avg_mem_gib, as with the peaks, and the means of the others."""
    values = {name: [usage[name] for usage in usages if name in usage] for usage in usages for name in usage}
    return {name: max(of_ranks) if name == "avg_mem_gib" else fmean(of_ranks) for name, of_ranks in values.items()}


class UsageSampler:
    """Samples in a thread during a `with` block, and once at its start and at its end.

    columns: which figures to sample, by default all that this machine has. others: further GPUs that this process computes on, as
    DataParallel has them. NVML's figures are then means, and memory of tensors is that of `device`, which holds the most.
    """

    def __init__(
        self,
        device: torch.device,
        interval_s: float = INTERVAL_S,
        columns: Collection[str] | None = None,
        others: Sequence[torch.device] = (),
    ) -> None:
        self.interval_s = interval_s
        readers = {"avg_mem_gib": memory_reader(device), **nvml_readers([device, *others])}
        self._readers = {name: read for name, read in readers.items() if columns is None or name in columns}
        self._samples: dict[str, list[float]] = {name: [] for name in self._readers}
        self._of_process: Usage = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)

    def __enter__(self) -> UsageSampler:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()
        wall_s = time.perf_counter() - self._began
        self._of_process = {"cpu_util_percent": 100 * (time.process_time() - self._cpu_began) / wall_s}

    def _watch(self) -> None:
        while not self._ended.wait(self.interval_s):
            self._sample()

    def _sample(self) -> None:
        for name, read in list(self._readers.items()):
            try:
                self._samples[name].append(read())
            # Not every GPU reports everything, for example its power.
            except pynvml.NVMLError as error:
                warn(f"{name} is not sampled any more (NVML: {error})")
                del self._readers[name]

    def usage(self) -> Usage:
        """Return the means so far, of figures that were reported."""
        return {name: fmean(samples) for name, samples in self._samples.items() if samples} | self._of_process


def memory_reader(device: torch.device) -> Reader:
    """Return a reader of the memory of tensors on a GPU as the allocator counts it, or else of the resident set, in GiB.

    The allocator counts when the host queues work, and the host runs ahead of the GPU. While the host waits for the device, the
    step's activations count as freed already. Where the GPU is the bottleneck, the mean is therefore a lower bound.
    """
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device) / GIB
    process = psutil.Process()
    return lambda: process.memory_info().rss / GIB


def nvml_readers(devices: Sequence[torch.device]) -> dict[str, Reader]:
    """Return readers of NVML's figures by column, means over `devices`, or none without a GPU.

    Where NVML does not work there are none either, and a warning is printed.
    """
    if devices[0].type != "cuda":
        return {}
    try:
        handles = [nvml_handle(device) for device in devices]
    except pynvml.NVMLError as error:
        warn(f"utilisation, memory in use and power of the GPU are not sampled (NVML: {error})")
        return {}
    return {
        "gpu_util_percent": lambda: fmean(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles),
        "gpu_mem_used_gib": lambda: fmean(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) / GIB,
        "power_w": lambda: fmean(pynvml.nvmlDeviceGetPowerUsage(handle) for handle in handles) / 1e3,
    }
