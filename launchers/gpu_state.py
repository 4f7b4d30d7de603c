"""A GPU as it is found: name, clocks, power, temperature, through NVML."""

from __future__ import annotations

from typing import Any

import torch

from gptscale.common.devices import nvml_handle


def gpu_state(device: torch.device) -> dict[str, Any]:
    """What the driver says now; empty on a CPU. Clocks in MHz, power in W, temperature in degrees C."""
    if device.type != "cuda":
        return {}
    import pynvml

    handle = nvml_handle(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
    }
