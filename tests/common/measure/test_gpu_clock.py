"""The clock, power and throttling of a GPU, by a driver that answers, refuses, or does not know the device."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from gptscale.common.measure import gpu_clock
from gptscale.common.measure.gpu_clock import GpuClock, GpuTime

CUDA = torch.device("cuda")


def refuse(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch):
    """A driver whose GPU was held down by power for 3 of 10 seconds, in which it used 4,000 J."""
    times, millijoules, held_down_ns = iter([100.0, 110.0]), iter([5_000_000, 9_000_000]), iter([10**9, 4 * 10**9])

    def violation(handle, policy):
        if policy != pynvml.NVML_PERF_POLICY_POWER:
            refuse()
        return SimpleNamespace(violationTime=next(held_down_ns))

    answers = {
        "HandleByUUID": lambda uuid: {"GPU-u": "handle"}[uuid],
        "TotalEnergyConsumption": lambda handle: next(millijoules),
        "ViolationStatus": violation,
        "CurrentClocksThrottleReasons": lambda handle: 4 | 32,
        "ClockInfo": lambda handle, kind: 1410,
        "MaxClockInfo": lambda handle, kind: 1980,
    }
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(gpu_clock.time, "monotonic", lambda: next(times))
    return answers


def test_a_gpu_that_is_held_down_by_power(driver):
    lap = GpuClock(CUDA).lap()
    assert (lap.clock_mhz, lap.clock_max_mhz, lap.power_w) == (1410, 1980, 400.0)
    assert lap.throttled == {"power": pytest.approx(0.3)}
    assert lap.reasons == ("power", "heat")
    assert str(lap) == (
        "clock 1,410 of 1,980 MHz, 400 W, held down by power for 30% of the time, held down by heat at the end"
    )


@pytest.mark.parametrize("knows_the_device", [True, False])
def test_counters_that_the_driver_refuses_are_missing(knows_the_device, driver, monkeypatch):
    for name in driver:
        if ("Handle" in name) != knows_the_device:
            monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    assert GpuClock(CUDA).lap() == GpuTime()
    assert str(GpuTime()) == ""
