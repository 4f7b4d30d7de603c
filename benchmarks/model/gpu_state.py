"""The state of a GPU while it works: name, clocks, power, temperature, through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gptscale.common.measure.devices import nvml_handle


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Return what the driver says now: clocks in MHz, power in W, temperature in degrees C, and nothing on a CPU.

    A figure is None where the driver does not say, as of power under MIG. There is nothing but the name where NVML does not
    know the device.
    """
    if device.type != "cuda":
        return {}
    import pynvml

    state: dict[str, Any] = {"name": torch.cuda.get_device_name(device)}
    try:
        handle = nvml_handle(device)
    except pynvml.NVMLError:
        return state
    queries: dict[str, Callable[[], Any]] = {
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "driver": pynvml.nvmlSystemGetDriverVersion,
    }
    for figure, ask in queries.items():
        try:
            state[figure] = ask()
        except pynvml.NVMLError:
            state[figure] = None
    return state
