"""What devices and links do by their data sheets, each with its source."""

from __future__ import annotations

from typing import NamedTuple

from gptscale.common.measure.devices import peak_tflops


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
PCIE3, PCIE4, PCIE5 = 15.75e9, 31.5e9, 63e9
# Name, words of common/measure/devices.PEAK_TFLOPS, bytes/s of memory, bus, source.
GPUS = (
    ("v100", "V100", 0.9e12, PCIE3, "NVIDIA V100 data sheet, 2020 (SXM2)"),
    ("a100-40", "A100", 1.555e12, PCIE4, "NVIDIA A100 data sheet, 2021 (SXM, 40 GB)"),
    ("a100-80", "A100", 2.039e12, PCIE4, "NVIDIA A100 data sheet, 2021 (SXM, 80 GB)"),
    ("h100-80", "H100", 3.35e12, PCIE5, "NVIDIA H100 data sheet, 2023 (SXM; half of the sparse rates)"),
    ("h200", "H200", 4.8e12, PCIE5, "NVIDIA H200 data sheet, 2024 (SXM; half of the sparse rates)"),
    ("b200", "B200", 8e12, PCIE5, "NVIDIA DGX B200 data sheet, 2024 (an eighth of it; half of the sparse rates)"),
    ("gb200", "GB200", 8e12, PCIE5, "NVIDIA GB200 NVL72 data sheet, 2024 (a 72nd of it; half of the sparse rates)"),
    ("24gb", "RTX 4090", 1.008e12, PCIE4, "NVIDIA Ada GPU architecture paper, 2022 (GeForce RTX 4090, fp32 sums)"),
)


def _sheet(words: str, precision: str, memory: float, bus: float, source: str) -> DeviceSheet | None:
    peak = peak_tflops(words, precision)
    return DeviceSheet(1e12 * peak, memory, bus, source) if peak else None


# In 16 bits by the device's name, in others with the precision behind it. fp32 is the ordinary rate, without TF32.
DEVICES: dict[str, DeviceSheet] = {}
for _name, _words, _memory, _bus, _source in GPUS:
    for _precision in ("fp16", "fp32", "fp8"):
        if _rates := _sheet(_words, _precision, _memory, _bus, _source):
            DEVICES[_name if _precision == "fp16" else f"{_name} {_precision}"] = _rates

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
# What a device usually has inside its node, and a node of it to others: HGX A100 with eight ports of HDR, DGX H100, H200 and
# B200 with eight of NDR (NVIDIA's DGX data sheets). For cards without NVLink a guess.
USUAL_LINKS = {
    "a100-80": ("nvlink3", "ib-1600"),
    "h100-80": ("nvlink4", "ib-3200"),
    "h200": ("nvlink4", "ib-3200"),
    "b200": ("nvlink5", "ib-3200"),
    "24gb": ("pcie4", "ethernet-25"),
}
# Of a node's NVMe disk, bytes/s read and written: Samsung 980 PRO data sheet, 2020 (PCIe 4).
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
