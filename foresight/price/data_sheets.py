"""What links, disks and hosts do by their data sheets, each with its source. Those of GPUs are common/measure/gpus.csv."""

from __future__ import annotations

from typing import NamedTuple

from gptscale.common.measure.gpus import PCIE4, PCIE5, PLAYED


class LinkSheet(NamedTuple):
    """Bytes a second each way: of one device inside a node, or of all ports of a node together."""

    rate: float
    source: str


PCIE_SPECIFICATION = "PCI-SIG, 16 lanes, 128b/130b"
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
DISK = {"read": 7e9, "write": 5e9}
# Bytes/s of a node's own memory: eight channels of DDR4-3200 (JEDEC JESD79-4).
HOST_MEMORY = 200e9


def sources_of(device: str, links: tuple[str, str]) -> list[str]:
    """Return where the figures of a device and of its links are from."""
    named = {device: PLAYED[device].source}
    named |= {name: sheet.source for name, sheet in (INNER_LINKS | OUTER_LINKS).items() if name in links}
    return [f"{name}: {source}" for name, source in named.items()]
