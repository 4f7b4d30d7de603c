"""The state of a GPU from a driver that answers, refuses, or does not know the device."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import torch

from benchmarks.model.gpu_state import gpu_state


def test_a_gpu_as_it_is_found(monkeypatch):
    nvml = types.ModuleType("pynvml")
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU = 1, 2, 0
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-u": "handle"}[uuid]
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: {1: 1755, 2: 3201}[kind]
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 698_500
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
    nvml.nvmlDeviceGetTemperature = lambda handle, kind: 61
    nvml.nvmlSystemGetDriverVersion = lambda: "575.1"
    nvml.NVMLError = OSError
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    state = gpu_state(torch.device("cuda"))
    assert (state["name"], state["sm_clock_mhz"], state["memory_clock_mhz"]) == ("NVIDIA H200", 1755, 3201)
    assert (state["power_w"], state["power_limit_w"], state["temperature_c"]) == (698.5, 700.0, 61)
    assert gpu_state(torch.device("cpu")) == {}

    def refuse(*_):
        raise OSError("Not Supported")

    nvml.nvmlDeviceGetPowerUsage = refuse
    assert gpu_state(torch.device("cuda")) == state | {"power_w": None}
    nvml.nvmlDeviceGetHandleByUUID = refuse
    assert gpu_state(torch.device("cuda")) == {"name": "NVIDIA H200"}
