"""The clock, power and throttling of a GPU, by a driver that answers, refuses, or does not know the device."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from gptscale.common.measure import gpu_clock
from gptscale.common.measure.contention import MachineClock
from gptscale.common.measure.gpu_clock import GpuClock, GpuTime

CUDA = torch.device("cuda")


@pytest.fixture
def driver(monkeypatch):
    """A driver whose GPU was held down by power for 3 of 10 seconds, in which it used 4,000 J."""
    nvml = types.ModuleType("pynvml")
    times, asked = iter([100.0, 110.0]), {"energy": iter([5_000_000, 9_000_000]), 0: iter([int(1e9), int(4e9)])}
    nvml.NVMLError = OSError
    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-u": "handle"}[uuid]
    nvml.NVML_CLOCK_SM, nvml.NVML_PERF_POLICY_POWER, nvml.NVML_PERF_POLICY_THERMAL = 1, 0, 1
    nvml.nvmlClocksThrottleReasonSwPowerCap, nvml.nvmlClocksThrottleReasonSwThermalSlowdown = 4, 32
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: next(asked["energy"])

    def violation(handle, policy):
        if policy not in asked:
            raise OSError("Not Supported")
        return SimpleNamespace(violationTime=next(asked[policy]))

    nvml.nvmlDeviceGetViolationStatus = violation
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 4 | 32
    nvml.nvmlDeviceGetClockInfo = lambda handle, kind: 1410
    nvml.nvmlDeviceGetMaxClockInfo = lambda handle, kind: 1980
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(gpu_clock.time, "monotonic", lambda: next(times))
    return nvml


def test_a_gpu_that_is_held_down_by_power(driver):
    lap = GpuClock(CUDA).lap()
    assert (lap.clock_mhz, lap.clock_max_mhz, lap.power_w) == (1410, 1980, 400.0)
    assert lap.throttled == {"power": pytest.approx(0.3)}
    assert lap.reasons == ("power", "heat")
    assert str(lap) == (
        "clock 1,410 of 1,980 MHz, 400 W, held down by power for 30% of the time, held down by heat at the end"
    )


@pytest.mark.parametrize("knows_the_device", [True, False])
def test_counters_that_the_driver_refuses_are_missing(knows_the_device, driver):
    def refuse(*arguments):
        raise OSError("Not Supported")

    for name in [name for name in vars(driver) if name.startswith("nvmlDeviceGet")]:
        if ("Handle" in name) != knows_the_device:
            setattr(driver, name, refuse)
    assert GpuClock(CUDA).lap() == GpuTime()
    assert str(GpuTime()) == ""


def test_a_machine_without_a_gpu_asks_no_driver():
    assert MachineClock(torch.device("cpu")).lap().gpu_time is None
