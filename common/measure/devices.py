"""Devices: their names, the peak rates of GPUs in a table with its sources, and the precisions that they support.

Rates are dense tensor-core rates in TFLOP/s from the data sheets of the vendors. They are without sparsity, which doubles the
figures in many headlines. fp32 is the ordinary rate, without TF32. A device that is not in the table has no peak, and its MFU
stays empty.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

# Words in the name that torch reports, then the dense TFLOP/s by precision. The first row whose words are in the name is used.
PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA Blackwell architecture brief, 2024 (half of the sparse figures)
    ("GB200", {"fp8": 5000.0, "bf16": 2500.0, "fp16": 2500.0, "fp32": 80.0}),
    ("B200", {"fp8": 4500.0, "bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0}),
    # NVIDIA H200 / H100 tensor core GPU data sheets
    ("H200 NVL", {"fp8": 1671.0, "bf16": 835.5, "fp16": 835.5, "fp32": 60.0}),
    ("H200", {"fp8": 1979.0, "bf16": 989.5, "fp16": 989.5, "fp32": 67.0}),
    ("H100 NVL", {"fp8": 1671.0, "bf16": 835.5, "fp16": 835.5, "fp32": 60.0}),
    ("H100 PCIe", {"fp8": 1513.0, "bf16": 756.5, "fp16": 756.5, "fp32": 51.0}),
    ("H100", {"fp8": 1979.0, "bf16": 989.5, "fp16": 989.5, "fp32": 67.0}),
    ("GH200", {"fp8": 1979.0, "bf16": 989.5, "fp16": 989.5, "fp32": 67.0}),
    # NVIDIA Ampere data sheets; A10 and RTX rates with fp32 accumulation
    ("A100", {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}),
    ("A10G", {"bf16": 70.0, "fp16": 70.0, "fp32": 31.5}),
    ("A10", {"bf16": 125.0, "fp16": 125.0, "fp32": 31.2}),
    ("RTX 3090 Ti", {"bf16": 80.0, "fp16": 80.0, "fp32": 40.0}),
    ("RTX 3090", {"bf16": 71.0, "fp16": 71.0, "fp32": 35.6}),
    # NVIDIA Ada data sheets
    ("L40S", {"fp8": 733.0, "bf16": 362.0, "fp16": 362.0, "fp32": 91.6}),
    ("L40", {"fp8": 362.0, "bf16": 181.0, "fp16": 181.0, "fp32": 90.5}),
    ("L4", {"fp8": 242.5, "bf16": 121.0, "fp16": 121.0, "fp32": 30.3}),
    ("RTX 4090", {"fp8": 330.3, "bf16": 165.2, "fp16": 165.2, "fp32": 82.6}),
    # NVIDIA Turing and Volta data sheets; no bf16
    ("RTX 2080 Ti", {"fp16": 53.8, "fp32": 13.4}),
    ("T4", {"fp16": 65.0, "fp32": 8.1}),
    ("V100", {"fp16": 125.0, "fp32": 15.7}),
    # AMD CDNA 3 data sheet
    ("MI300X", {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}),
)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU as its driver gives it, or `cpu: ` and the model of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        # There is no such file outside Linux, and no such line on Arm.
        return "cpu"
    return f"cpu: {model}"


def peak_tflops(name: str, precision: str) -> float | None:
    """Return the dense peak of the named device in TFLOP/s, or None if the table does not have the device or precision."""
    if name.startswith("cpu"):
        return None
    for words, rates in PEAK_TFLOPS:
        # Only whole words count: a T400 is no T4, an A1000 is no A100.
        if re.search(rf"\b{words}\b", name):
            return rates.get(precision)
    return None


# Names in /proc/cpuinfo, on x86 and Arm, of which oneDNN needs one for a fast product: any AVX-512 for words does for bf16.
CPU_INSTRUCTIONS = {"bf16": {"avx512bw", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the processor's instruction sets as the kernel names them, or none on other systems than Linux."""
    if not cpuinfo.is_file():
        return set()
    lines = (line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
    return next((set(words.split()) for key, words in lines if key.strip() in ("flags", "Features")), set())


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


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if NVML cannot tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
