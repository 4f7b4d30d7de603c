"""What devices and links do by their data sheets, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from gptscale.common.measure.gpus import GPUS, PCIE4, PCIE5, Gpu


class DeviceSheet(NamedTuple):
    """A device in one precision. flops: dense, a second. memory, bus: bytes a second, of the bus to the host each way."""

    flops: float
    memory: float
    bus: float
    source: str


class LinkSheet(NamedTuple):
    """Bytes a second each way: of one device inside a node, or of all ports of a node together."""

    rate: float
    source: str


PCIE_SPECIFICATION = "PCI-SIG, 16 lanes, 128b/130b"


def _sheets(gpu: Gpu) -> dict[str, DeviceSheet]:
    """Return the data sheets of a GPU by name. Other precisions than 16 bits stand behind the name."""
    names = {"fp16": gpu.name, "fp32": f"{gpu.name} fp32", "fp8": f"{gpu.name} fp8"}
    return {
        name: DeviceSheet(1e12 * gpu.tflops[precision], gpu.memory, gpu.bus, gpu.source)
        for precision, name in names.items()
        if precision in gpu.tflops
    }


DEVICES = {name: sheet for gpu in GPUS if gpu.name for name, sheet in _sheets(gpu).items()}

# Inside a node, of one device.
INNER_LINKS = {
    "nvlink2": LinkSheet(150e9, "NVIDIA V100 data sheet, 2020: 300 GB/s both ways"),
    "nvlink3": LinkSheet(300e9, "NVIDIA A100 data sheet, 2021: 600 GB/s both ways"),
    "nvlink4": LinkSheet(450e9, "NVIDIA H100 data sheet, 2023: 900 GB/s both ways"),
    "nvlink5": LinkSheet(900e9, "NVIDIA DGX B200 data sheet, 2024: 1.8 TB/s both ways"),
    # Devices without NVLink share it with the host.
    "pcie4": LinkSheet(PCIE4, PCIE_SPECIFICATION),
    "pcie5": LinkSheet(PCIE5, PCIE_SPECIFICATION),
}
# Between nodes, of all ports of a node. The number of a name is Gb/s.
_KINDS = (
    (
        "ib",
        (100, 200, 400, 800, 1600, 3200, 6400),
        "InfiniBand Trade Association's roadmap: EDR 100, HDR 200, NDR 400, XDR 800",
    ),
    ("roce", (100, 200, 400, 800, 1600, 3200), "IEEE 802.3bs and 802.3df: the rate of the ports"),
    ("efa", (400, 3200), "AWS EC2: 400 Gb/s a p4d, 3200 Gb/s a p5 instance"),
    ("ethernet", (1, 10, 25, 100), "IEEE 802.3: the rate of the port"),
)
OUTER_LINKS = {
    f"{kind}-{gigabits}": LinkSheet(gigabits / 8 * 1e9, source)
    for kind, speeds, source in _KINDS
    for gigabits in speeds
}
# Bytes/s that a node's NVMe disk reads and writes: Samsung 980 PRO data sheet, 2020 (PCIe 4).
DISK_READS, DISK_WRITES = 7e9, 5e9
# Parameters a second that AdamW steps on the host, which reads and writes some 30 bytes for each: 200 GB/s are eight channels of
# DDR4-3200 (JEDEC JESD79-4).
HOST_PARAMETERS = 200e9 / 30

# The machine that this runs on, whatever it is, and what its ranks talk through.
HERE, GLOO, NCCL = "here", "gloo", "nccl"
GUESS = "a guess, which any measurement outweighs"
DEVICES[HERE] = DeviceSheet(80e9, 10e9, PCIE4, GUESS)
# Bytes/s inside a node and between nodes, by the names of both.
LINKS = {
    f"{inner} {outer}": (inside.rate, outside.rate)
    for inner, inside in INNER_LINKS.items()
    for outer, outside in OUTER_LINKS.items()
} | {GLOO: (1.5e9, 1e9), NCCL: (100e9, 25e9)}


def of_its_kind(name: str) -> str:
    """Return a device or link without the place behind an @. Machines of one kind that are measured apart have such names."""
    return name.partition("@")[0]


def sheet_of(device: str, precision: str) -> str:
    """Return the name under which a device's rates in a precision are filed. fp32 and fp8 have their own."""
    return f"{device} {precision}" if f"{device} {precision}" in DEVICES else device


def sources_of(device: str, links: str) -> list[str]:
    """Return where the figures of a device and of its links are from."""
    named = {device: DEVICES[device].source}
    named |= {name: sheet.source for name, sheet in (INNER_LINKS | OUTER_LINKS).items() if name in links.split()}
    return [f"{name}: {source}" for name, source in named.items()]
