"""How much of the machine others took while a run was timed: steal, other programs, throttling by the cgroup, the GPU.

All figures are counters that the system keeps anyway. They are read twice, so that a timed step pays nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from gptscale.common.measure.devices import ask_nvml

if TYPE_CHECKING:
    from gptscale.common.measure.gpu_clock import GpuClock, GpuTime

# /proc/stat counts in ticks of 10 ms. In a shorter time a few of them would look like another program.
SECONDS_MIN = 1.0


@dataclass(frozen=True)
class MachineTime:
    """The processor time of a machine in a span of time, in seconds, as one process of a run sees it.

    busy_s, stolen_s: of each processor that this process may use, the time in which anything ran there, and in which the
    hypervisor gave it to other machines. own_s: the time of this process, of those that it started, and of the kernel for what
    they wrote to disk. throttled_s: the time in which its cgroup was not let run. threads: how many processors this process
    uses at once. gpu: the share of its GPU that other processes took, None without a GPU or an answer. gpu_time: the clock and
    the power of that GPU.
    """

    host: str
    wall_s: float
    busy_s: dict[int, float]
    stolen_s: dict[int, float]
    own_s: float
    throttled_s: float
    threads: int
    gpu: float | None = None
    gpu_time: GpuTime | None = None


class MachineClock:
    """The counters of the machine at one moment, from which `lap` counts.

    device: the GPU that is watched, if it is one. threads: how many processors this process uses at once, by default those of
    torch, and with a GPU one for Python and one for autograd.
    """

    def __init__(self, device: torch.device | None = None, threads: int | None = None) -> None:
        self.device = device
        on_gpu = device is not None and device.type == "cuda"
        self.threads = threads or (2 if on_gpu else torch.get_num_threads())
        self._gpu: GpuClock | None = None
        if device is not None and on_gpu:
            from gptscale.common.measure.gpu_clock import GpuClock

            self._gpu = GpuClock(device)
        self._began = self._now()

    def _now(self) -> tuple[float, dict[int, tuple[float, float]], float, float]:
        return time.monotonic(), processor_times(), own_time_s(), throttled_s()

    def lap(self) -> MachineTime:
        (began, before, own, throttled), now = self._began, self._now()
        spent = {cpu: (busy - before[cpu][0], stolen - before[cpu][1]) for cpu, (busy, stolen) in now[1].items()}
        return MachineTime(
            host=socket.gethostname(),
            wall_s=now[0] - began,
            busy_s={cpu: busy for cpu, (busy, _) in spent.items()},
            stolen_s={cpu: stolen for cpu, (_, stolen) in spent.items()},
            own_s=now[2] - own,
            throttled_s=now[3] - throttled,
            threads=self.threads,
            gpu=_gpu_taken(self.device, now[0] - began),
            gpu_time=self._gpu.lap() if self._gpu else None,
        )


def taken_fraction(of_ranks: Sequence[MachineTime]) -> float | None:
    """Return the share of what a run wanted that others took, on the machine or GPU where that was most.

    A run wants as many processors as it has threads. Others may use the rest for nothing. Steal and throttling count whole.
    None if less than a second was watched, or the system keeps no such counters.
    """
    shares = []
    for host in {t.host for t in of_ranks}:
        ranks = [t for t in of_ranks if t.host == host]
        wall_s = max(t.wall_s for t in ranks)
        cpus = {cpu for t in ranks for cpu in t.busy_s}
        if wall_s < SECONDS_MIN or not cpus:
            continue
        busy_s = sum(max(t.busy_s.get(cpu, 0.0) for t in ranks) for cpu in cpus)
        stolen_s = sum(max(t.stolen_s.get(cpu, 0.0) for t in ranks) for cpu in cpus)
        usable = min(len(cpus), sum(t.threads for t in ranks))
        others_s = max(0.0, busy_s - sum(t.own_s for t in ranks) - (len(cpus) - usable) * wall_s)
        throttled = max(t.throttled_s for t in ranks)
        shares.append(min(1.0, (others_s + stolen_s * usable / len(cpus) + throttled) / (usable * wall_s)))
        shares += [t.gpu for t in ranks if t.gpu is not None]
    return max(shares, default=None)


def processor_times() -> dict[int, tuple[float, float]]:
    """Return (busy, stolen) seconds since boot of each processor that this process may use, none where Linux does not tell."""
    with suppress(OSError, AttributeError):
        usable, of_all = os.sched_getaffinity(0), enumerate(psutil.cpu_times(percpu=True))
        return {cpu: (t.user + t.nice + t.system + t.irq + t.softirq, t.steal) for cpu, t in of_all if cpu in usable}
    return {}


def own_time_s() -> float:
    """Return the processor time of this process, of those that it started, and of those of them that have ended."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            # Processor time in user and system mode, and both of children that ended.
            total += sum(process.cpu_times()[:4])
    return total


def throttled_s(proc: Path = Path("/proc")) -> float:
    """Return the seconds that this process's cgroup, or one above it, was not let run, by version 2 or 1 of cgroups."""
    most = 0.0
    for file in _cpu_stats(proc):
        with suppress(OSError, ValueError):
            counters = dict(line.split() for line in file.read_text().splitlines())
            most = max(most, int(counters.get("throttled_usec", 0)) / 1e6, int(counters.get("throttled_time", 0)) / 1e9)
    return most


def _cpu_stats(proc: Path) -> Iterator[Path]:
    """Yield the files cpu.stat of this process's cgroup and of those above it."""
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            for root in [controllers, "cpu"] if controllers else ["", "unified"]:
                home = Path("/sys/fs/cgroup", root)
                here = home / path.lstrip("/")
                yield from (at / "cpu.stat" for at in (here, *here.parents) if at.is_relative_to(home))


def _gpu_taken(device: torch.device | None, wall_s: float) -> float | None:
    """Return the mean share of a GPU's time in the last `wall_s` seconds that other processes used, None if NVML cannot tell.

    In a container NVML names processes by other numbers. Then the busiest process is taken for this one.
    """
    if device is None or device.type != "cuda":
        return None
    samples = ask_nvml(device, "ProcessUtilization", int((time.time() - wall_s) * 1e6))
    if samples is None:
        return None
    used: dict[int, list[int]] = {}
    for sample in samples:
        used.setdefault(sample.pid, []).append(sample.smUtil)
    shares = {pid: sum(values) / len(values) / 100 for pid, values in used.items()}
    own = os.getpid() if os.getpid() in shares else max(shares, key=lambda pid: shares[pid], default=0)
    return min(1.0, sum(share for pid, share in shares.items() if pid != own))
