"""Devices: their names, their peak rates, and the precisions that they support."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from gptscale.common.measure.gpus import GPUS

CPUINFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """Return the name of a GPU as its driver gives it, or `cpu: ` and the model of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Arm has no such line.
    return f"cpu: {model}" if (model := _cpu_fact("model name")) else "cpu"


def peak_tflops(name: str, precision: str) -> float | None:
    """Return the dense peak of the named device in TFLOP/s, or None if the table does not have the device or precision."""
    if name.startswith("cpu"):
        return None
    # Only whole words count: a T400 is no T4, an A1000 is no A100.
    return next((gpu.tflops.get(precision) for gpu in GPUS if re.search(rf"\b{gpu.words}\b", name)), None)


# Names in /proc/cpuinfo, on x86 and Arm, of which oneDNN needs one for a fast product: any AVX-512 for words does for bf16.
CPU_INSTRUCTIONS = {"bf16": {"avx512bw", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's instruction sets as the kernel names them."""
    return set(_cpu_fact("flags", "Features", cpuinfo=cpuinfo).split())


def _cpu_fact(*names: str, cpuinfo: Path = CPUINFO) -> str:
    facts = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    return next((words.strip() for name, words in facts if name.strip() in names), "")


def is_emulated(precision: str) -> bool:
    """Return whether this processor has no instructions for products in `precision`, so that they are many times slower."""
    needed, flags = CPU_INSTRUCTIONS.get(precision), cpu_flags()
    return bool(needed and flags and not needed & flags)


def supports_bf16(capability: tuple[int, int]) -> bool:
    """Return whether a CUDA compute capability multiplies bf16 in hardware, as Ampere (8.0) and newer do."""
    return capability >= (8, 0)


def supports_fp8(capability: tuple[int, int]) -> bool:
    """Return whether a GPU multiplies e4m3 and e5m2 as NVIDIA encodes them: Ada (8.9) and newer, and no AMD GPU."""
    return torch.version.hip is None and capability >= (8, 9)


def nvml_handle(device: torch.device) -> Any:
    """Return the handle that NVML has for a CUDA device.

    The device is looked up by its UUID, because torch counts only the devices that CUDA_VISIBLE_DEVICES shows. Raises
    pynvml.NVMLError if NVML cannot be used.
    """
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def ask_nvml(device: torch.device, query: str, *arguments: str | int) -> Any:
    """Return the driver's answer to nvmlDeviceGet`query`, None if it has none. A text is the name of one of its constants."""
    import pynvml

    try:
        values = [getattr(pynvml, f"NVML_{value}") if isinstance(value, str) else value for value in arguments]
        return getattr(pynvml, f"nvmlDeviceGet{query}")(nvml_handle(device), *values)
    except (pynvml.NVMLError, AttributeError):
        return None


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if NVML cannot tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
