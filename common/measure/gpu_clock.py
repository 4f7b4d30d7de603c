"""The clock, the power and the throttling of a GPU in a span of time, from counters that its driver keeps anyway."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gptscale.common.measure.devices import ask_nvml

# Reasons for a lower clock, by the names of NVML's performance policies and of its bits for the present.
POLICIES = {"power": "POWER", "heat": "THERMAL", "the board's limit": "BOARD_LIMIT", "reliability": "RELIABILITY"}
REASONS = {
    "power": ("SwPowerCap", "HwPowerBrakeSlowdown"),
    "heat": ("SwThermalSlowdown", "HwThermalSlowdown"),
    "hardware": ("HwSlowdown",),
    "clocks that were set": ("ApplicationsClocksSetting",),
}
# A reason that held the clock down for less of the time says nothing.
SHARE_MIN = 0.01


@dataclass(frozen=True)
class GpuTime:
    """What a GPU did in a span of time. A figure is None where the driver does not tell.

    clock_mhz, reasons: the clock of its multiprocessors at the end of the span, and why it was not higher. power_w: the mean.
    throttled: for each reason the share of the span in which it held the clock down.
    """

    clock_mhz: float | None = None
    clock_max_mhz: float | None = None
    power_w: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = []
        if self.clock_mhz and self.clock_max_mhz:
            words.append(f"clock {self.clock_mhz:,.0f} of {self.clock_max_mhz:,.0f} MHz")
        if self.power_w:
            words.append(f"{self.power_w:,.0f} W")
        longest = {reason: share for reason, share in self.throttled.items() if share >= SHARE_MIN}
        words += [f"held down by {reason} for {share:.0%} of the time" for reason, share in longest.items()]
        words += [f"held down by {reason} at the end" for reason in self.reasons if reason not in longest]
        return ", ".join(words)


class GpuClock:
    """The counters of a GPU at one moment, from which `lap` counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began = time.monotonic()
        self._energy_j, self._violated_s = self._counters()

    def _counters(self) -> tuple[float | None, dict[str, float]]:
        millijoules = ask_nvml(self.device, "TotalEnergyConsumption")
        violated_s: dict[str, float] = {}
        for reason, policy in POLICIES.items():
            if status := ask_nvml(self.device, "ViolationStatus", f"PERF_POLICY_{policy}"):
                violated_s[reason] = status.violationTime / 1e9
        return None if millijoules is None else millijoules / 1e3, violated_s

    def lap(self) -> GpuTime:
        import pynvml

        seconds = max(time.monotonic() - self._began, 1e-9)
        energy_j, violated_s = self._counters()
        bits = ask_nvml(self.device, "CurrentClocksThrottleReasons") or 0
        bits_of_reason = {
            reason: [getattr(pynvml, f"nvmlClocksThrottleReason{name}", 0) for name in names]
            for reason, names in REASONS.items()
        }
        power_w, before = None, self._violated_s
        if energy_j is not None and self._energy_j is not None:
            power_w = (energy_j - self._energy_j) / seconds
        return GpuTime(
            clock_mhz=ask_nvml(self.device, "ClockInfo", "CLOCK_SM"),
            clock_max_mhz=ask_nvml(self.device, "MaxClockInfo", "CLOCK_SM"),
            power_w=power_w,
            throttled={r: min(1.0, (s - before[r]) / seconds) for r, s in violated_s.items() if r in before},
            reasons=tuple(reason for reason, masks in bits_of_reason.items() if any(bits & mask for mask in masks)),
        )
