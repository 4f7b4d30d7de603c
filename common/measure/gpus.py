"""The table of GPUs (gpus.csv): peak rates, memory, links, and what a GPU tells of itself.

Rates are dense tensor-core rates in TFLOP/s: without sparsity, which doubles the figures in many headlines, and with fp32 sums,
which GeForce cards halve. fp32 is the ordinary rate, without TF32. Turing and Volta have no bf16.

A row's source is that of its rates. Links are what it usually has inside its node, and a node of it to others: NVIDIA's DGX
data sheets, HGX A100 with eight ports of HDR, DGX H100, H200 and B200 with eight of NDR; for cards without NVLink a guess.
Memory in GiB is the "total capacity" in torch's messages for this device (github.com/pytorch/pytorch/issues). The rest is of
the CUDA C++ programming guide, table of compute capabilities, and of NVIDIA's architecture papers. Code is the capability whose
kernels it runs, where that is another: PyTorch's wheels hold no kernels for 8.9, and CUB chooses its parameters by 8.6.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB, MIB = 2**30, 2**20
PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


@dataclass(frozen=True)
class Properties:
    """What a program can ask a GPU about itself.

    memory: bytes that the driver reports, a little less than the name says. threads, blocks: per multiprocessor, at most.
    shared_block, shared: bytes of shared memory per block (at most) and per multiprocessor. bus: bits. code: 0 for its own.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    blocks: int
    shared_block: int
    shared: int
    l2: int
    bus: int
    code: int = 0


@dataclass(frozen=True)
class Gpu:
    """One row. words: of the name that torch reports. tflops: by precision.

    name: what plans call it; "" where only its rates are known. memory, bus: bytes/s, of the bus to the host each way.
    links: inside its node, and of a node to others. properties: with them it can be simulated and planned for.
    """

    words: str
    tflops: Mapping[str, float]
    source: str
    name: str
    memory: float
    bus: float
    links: tuple[str, str]
    properties: Properties | None


def _read(row: Mapping[str, str]) -> Gpu:
    rates = {precision: float(row[precision]) for precision in PRECISIONS if row[precision]}
    properties = None
    if row["device"]:
        major, minor = (int(number) for number in row["capability"].split("."))
        limits = ("multiprocessors", "threads", "blocks", "shared_block", "shared")
        properties = Properties(
            row["device"],
            int(float(row["memory_gib"]) * GIB),
            (major, minor),
            **{name: int(row[name]) for name in limits},
            l2=int(row["l2_mib"]) * MIB,
            bus=int(row["bus_bits"]),
            code=int(row["code"] or 0),
        )
    memory, bus, links = float(row["memory_b_s"] or 0), float(row["bus_b_s"] or 0), (row["inside"], row["outside"])
    return Gpu(row["words"], rates, row["source"], row["name"], memory, bus, links, properties)


# The first row whose words are in a device's name is the device's.
GPUS = tuple(map(_read, csv.DictReader(Path(__file__).with_name("gpus.csv").read_text().splitlines())))
# Those that a plan or a simulation can be for, by name
SIMULATED = {gpu.name: gpu for gpu in GPUS if gpu.properties}
