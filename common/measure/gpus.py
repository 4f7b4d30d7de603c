"""The table of GPUs, each figure with its source: peak rates, memory, links, and what a GPU tells of itself.

Rates are dense tensor-core rates in TFLOP/s. They are without sparsity, which doubles the figures in many headlines. fp32 is the
ordinary rate, without TF32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB, MIB = 2**30, 2**20
# Bytes a second each way of 16 lanes, 128b/130b: PCI-SIG
PCIE3, PCIE4, PCIE5 = 15.75e9, 31.5e9, 63e9


@dataclass(frozen=True)
class Properties:
    """What a program can ask a GPU about itself.

    memory: bytes that the driver reports, a little less than the name says. threads, blocks: per multiprocessor, at most.
    shared_block, shared: bytes of shared memory per block (at most) and per multiprocessor. bus: bits. code: the capability whose
    kernels it runs, 0 for its own.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int
    threads: int = 2048
    blocks: int = 32
    shared_block: int = 232448
    shared: int = 233472
    l2: int = 50 * MIB
    bus: int = 5120
    code: int = 0


@dataclass(frozen=True)
class Gpu:
    """One row. words: of the name that torch reports. tflops: by precision. source: of all but `links` and `properties`.

    name: what plans call it; "" where only its rates are known. memory, bus: bytes/s, of the bus to the host each way.
    links: what it usually has inside its node, and a node of it to others. properties: with them it can be simulated and planned
    for.
    """

    words: str
    tflops: Mapping[str, float]
    source: str
    name: str = ""
    memory: float = 0.0
    bus: float = 0.0
    links: tuple[str, str] = ("pcie4", "ethernet-25")
    properties: Properties | None = None


def _rates(bf16: float, fp32: float, fp8: float | None = None) -> dict[str, float]:
    """Return the rates of a GPU that multiplies bf16 as fast as fp16."""
    return {"bf16": bf16, "fp16": bf16, "fp32": fp32} | ({"fp8": fp8} if fp8 else {})


# With fp32 accumulation, which GeForce cards halve
A100, HOPPER, HOPPER_NVL = _rates(312.0, 19.5), _rates(989.5, 67.0, 1979.0), _rates(835.5, 60.0, 1671.0)

# The first row whose words are in a device's name is the device's. Links: NVIDIA's DGX data sheets, HGX A100 with eight ports of
# HDR, DGX H100, H200 and B200 with eight of NDR. For cards without NVLink a guess. Memory in `properties`: "total capacity" in
# torch's messages for this device (github.com/pytorch/pytorch/issues). The rest of them: CUDA C++ programming guide, table of
# compute capabilities, and NVIDIA's architecture papers of each generation.
GPUS = (
    # Turing and Volta have no bf16.
    Gpu("V100", {"fp16": 125.0, "fp32": 15.7}, "NVIDIA V100 data sheet, 2020 (SXM2)", "v100", 0.9e12, PCIE3),
    Gpu("T4", {"fp16": 65.0, "fp32": 8.1}, "NVIDIA Turing data sheets"),
    Gpu("RTX 2080 Ti", {"fp16": 53.8, "fp32": 13.4}, "NVIDIA Turing data sheets"),
    Gpu("A100", A100, "NVIDIA A100 data sheet, 2021 (SXM, 40 GB)", "a100-40", 1.555e12, PCIE4),
    Gpu(
        "A100",
        A100,
        "NVIDIA A100 data sheet, 2021 (SXM, 80 GB)",
        "a100-80",
        2.039e12,
        PCIE4,
        ("nvlink3", "ib-1600"),
        Properties("NVIDIA A100-SXM4-80GB", int(79.25 * GIB), (8, 0), 108, 2048, 32, 166912, 167936, 40 * MIB, 5120),
    ),
    Gpu(
        "A10G",
        _rates(70.0, 31.5),
        "NVIDIA Ampere data sheets",
        "a10g",
        0.6e12,
        PCIE4,
        # github.com/meta-pytorch/torchtune/pull/229
        properties=Properties("NVIDIA A10G", int(22.19 * GIB), (8, 6), 80, 1536, 16, 101376, 102400, 6 * MIB, 384),
    ),
    Gpu(
        "RTX A6000",
        _rates(154.8, 38.7),
        "NVIDIA RTX A6000 data sheet, 2020 (half of the sparse rates)",
        "a6000",
        0.768e12,
        PCIE4,
        properties=Properties("NVIDIA RTX A6000", int(47.54 * GIB), (8, 6), 84, 1536, 16, 101376, 102400, 6 * MIB, 384),
    ),
    Gpu("A10", _rates(125.0, 31.2), "NVIDIA Ampere data sheets"),
    Gpu("RTX 3090 Ti", _rates(80.0, 40.0), "NVIDIA Ampere data sheets"),
    Gpu("RTX 3090", _rates(71.0, 35.6), "NVIDIA Ampere data sheets"),
    Gpu("H100 NVL", HOPPER_NVL, "NVIDIA H100 data sheet"),
    Gpu("H100 PCIe", _rates(756.5, 51.0, 1513.0), "NVIDIA H100 data sheet"),
    Gpu(
        "H100",
        HOPPER,
        "NVIDIA H100 data sheet, 2023 (SXM; half of the sparse rates)",
        "h100-80",
        3.35e12,
        PCIE5,
        ("nvlink4", "ib-3200"),
        Properties("NVIDIA H100 80GB HBM3", int(79.11 * GIB), (9, 0), 132),
    ),
    Gpu(
        "H100",
        HOPPER,
        "torchtitan's pages of its H100 (96 GB HBM2e; its logs say 48.87 GiB, 51.44 %)",
        "h100-96",
        2.4e12,
        PCIE5,
        ("nvlink4", "ib-3200"),
        Properties("NVIDIA H100", int(95.0 * GIB), (9, 0), 132, bus=6144),
    ),
    Gpu("GH200", HOPPER, "NVIDIA H100 data sheet"),
    Gpu("H200 NVL", HOPPER_NVL, "NVIDIA H200 data sheet"),
    Gpu(
        "H200",
        HOPPER,
        "NVIDIA H200 data sheet, 2024 (SXM; half of the sparse rates)",
        "h200",
        4.8e12,
        PCIE5,
        ("nvlink4", "ib-3200"),
        Properties("NVIDIA H200", int(139.81 * GIB), (9, 0), 132, bus=6144),
    ),
    Gpu(
        "B200",
        _rates(2250.0, 75.0, 4500.0),
        "NVIDIA DGX B200 data sheet, 2024 (an eighth of it; half of the sparse rates)",
        "b200",
        8e12,
        PCIE5,
        ("nvlink5", "ib-3200"),
        Properties("NVIDIA B200", int(178.35 * GIB), (10, 0), 148, l2=126 * MIB, bus=8192),
    ),
    Gpu(
        "GB200",
        _rates(2500.0, 80.0, 5000.0),
        "NVIDIA GB200 NVL72 data sheet, 2024 (a 72nd of it; half of the sparse rates)",
        "gb200",
        8e12,
        PCIE5,
    ),
    Gpu(
        "L40S",
        _rates(362.0, 91.6, 733.0),
        "NVIDIA Ada data sheets",
        "l40s",
        0.864e12,
        PCIE4,
        # github.com/stepfun-ai/Step-Video-T2V/issues/8; code as for the RTX 4090 below
        properties=Properties(
            "NVIDIA L40S", int(44.42 * GIB), (8, 9), 142, 1536, 24, 101376, 102400, 96 * MIB, 384, 86
        ),
    ),
    Gpu("L40", _rates(181.0, 90.5, 362.0), "NVIDIA Ada data sheets"),
    Gpu("L4", _rates(121.0, 30.3, 242.5), "NVIDIA Ada data sheets"),
    Gpu(
        "RTX 4090",
        _rates(165.2, 82.6, 330.3),
        "NVIDIA Ada GPU architecture paper, 2022 (GeForce RTX 4090, fp32 sums)",
        "24gb",
        1.008e12,
        PCIE4,
        # PyTorch's wheels hold no kernels for 8.9. It runs those for 8.6, and CUB chooses its parameters by that.
        properties=Properties(
            "NVIDIA GeForce RTX 4090", int(23.64 * GIB), (8, 9), 128, 1536, 24, 101376, 102400, 72 * MIB, 384, 86
        ),
    ),
    Gpu("MI300X", _rates(1307.4, 163.4), "AMD CDNA 3 data sheet"),
)
# Those that a plan or a simulation can be for, by name
PLAYED = {gpu.name: gpu for gpu in GPUS if gpu.properties}
