"""Tests of the usage sampler on this processor, and on a GPU whose allocator and NVML are fakes."""

import mmap
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch

from gptscale.results.record.usage import GIB, UsageSampler, over_ranks

CUDA = torch.device("cuda", 1)


def test_a_process_on_a_processor():
    before = psutil.Process().memory_info().rss / GIB
    with (
        # This is not by malloc, which may still have the memory from an earlier test.
        mmap.mmap(-1, GIB // 4) as held,
        UsageSampler(torch.device("cpu"), interval_s=0.002) as sampler,
    ):
        for _ in range(256):
            held.write(bytes(2**20))
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    usage = sampler.usage()
    assert before + 0.05 < usage["avg_mem_gib"] < before + 0.3
    assert usage["cpu_util_percent"] > 0
    assert len(usage) == 2


def sampled(device=CUDA, **options):
    """Return what a sampler says of a moment, between its two samples."""
    with UsageSampler(device, interval_s=60, **options) as sampler:
        pass
    return sampler.usage()


@pytest.fixture
def nvml(monkeypatch):
    """Return a fake NVML with one GPU, torch's second by its UUID, which raises `power` if that is an error."""
    fake = SimpleNamespace(power=250_000, utilisation=iter([80, 40]), asked=[])

    def handle(uuid):
        fake.asked.append(uuid)
        return "handle"

    def power(handle):
        if isinstance(fake.power, Exception):
            raise fake.power
        return int(fake.power)

    calls: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=next(fake.utilisation)),
        "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(used=3 * GIB),
        "nvmlDeviceGetPowerUsage": power,
    }
    for name, call in calls.items():
        monkeypatch.setattr(pynvml, name, call)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"abc-{device.index}"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB // 2)
    return fake


def test_a_gpu(nvml):
    assert [*sampled().values()][:-1] == [0.5, 60.0, 3.0, 250.0]
    assert nvml.asked == ["GPU-abc-1"]


def test_several_gpus_of_one_process_are_a_mean(nvml):
    """One busy GPU and one idle one are not one busy GPU."""
    nvml.utilisation = iter([8, 1, 8, 1])
    assert sampled(torch.device("cuda", 0), others=[CUDA])["gpu_util_percent"] == 4.5
    assert nvml.asked == ["GPU-abc-0", "GPU-abc-1"]


def test_a_gpu_that_does_not_tell_its_power(nvml, capsys):
    nvml.power = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    usage = sampled()
    assert "power_w" not in usage
    assert usage["gpu_util_percent"] == 60.0
    assert capsys.readouterr().err == "gptscale: warning: power_w is not sampled any more (NVML: Not Supported)\n"


def test_a_gpu_without_nvml(nvml, monkeypatch, capsys):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    usage = sampled()
    assert usage["avg_mem_gib"] == 0.5
    assert "gpu_util_percent" not in usage
    assert "are not sampled (NVML: NVML Shared Library Not Found)" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_real_gpu():
    device = torch.device("cuda", 0)
    with UsageSampler(device, interval_s=0.01) as sampler:
        held = torch.ones(2**26, device=device)
        time.sleep(0.2)
        held.add_(1)
    usage = sampler.usage()
    assert usage["avg_mem_gib"] > 0.1
    assert usage["gpu_mem_used_gib"] > 0.25
    assert "gpu_util_percent" in usage


def test_one_row_of_two_ranks():
    ranks = [{"avg_mem_gib": 1.0, "gpu_util_percent": 50.0}, {"avg_mem_gib": 2.0, "gpu_util_percent": 100.0}]
    assert over_ranks([*ranks, {"power_w": 9.0}]) == {"avg_mem_gib": 2.0, "gpu_util_percent": 75.0, "power_w": 9.0}
