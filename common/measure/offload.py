"""The state that a strategy keeps off the device, and the time that a step waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Offload:
    """What one process keeps off the device.

    cpu_bytes, disk_bytes: training state in host memory and in files.
    read_bytes_per_s, write_bytes_per_s: the rates of its files, None without files.
    waits_s: for each optimizer step so far, the seconds blocked in file I/O and in the optimizer's step on the host.
    """

    cpu_bytes: int = 0
    disk_bytes: int = 0
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    waits_s: tuple[float, ...] = ()


class StepMeter:
    """A meter of the seconds spent inside `optimizer.step()`, which a strategy may call several times per training step."""

    def __init__(self, optimizer: torch.optim.Optimizer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total_s, self._clock, self._began = 0.0, clock, 0.0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *args: object) -> None:
        self._began = self._clock()

    def _after(self, *args: object) -> None:
        self.total_s += self._clock() - self._began
