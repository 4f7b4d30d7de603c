"""What devices and links do by their data sheets: the expectation before any measurement."""

from __future__ import annotations

from gptscale.foresight.time.calibration import Prior, RateName
from gptscale.foresight.time.operations import (
    ATTENTION,
    DISK_READ,
    DISK_WRITE,
    FAR,
    FLOP,
    FROM_HOST,
    HOST,
    HOST_STEP,
    INNER,
    KINDS,
    LAUNCH,
    MEMORY,
    MESSAGE,
    OPTIMIZER,
    OUTER,
    TO_HOST,
)

# Dense 16-bit FLOP/s and bytes/s of memory: NVIDIA's data sheets.
DEVICES = {
    "v100": (125e12, 0.9e12),
    "a100-40": (312e12, 1.56e12),
    "a100-80": (312e12, 2.04e12),
    "a100-80 in a node": (312e12, 2.04e12),
    "h100-80": (989.5e12, 3.35e12),
    "h100-80 fp8": (1979e12, 3.35e12),
    "h200": (989.5e12, 4.8e12),
    "b200": (2250e12, 8e12),
    "gb200": (2500e12, 8e12),
    # GeForce RTX 4090: NVIDIA's Ada architecture paper, dense rate with fp32 accumulation
    "24gb": (165.2e12, 1.008e12),
    # Products in fp32, as torch computes them unless it is told otherwise: no tensor cores.
    "a100-80 fp32": (19.5e12, 2.04e12),
    "h100-80 fp32": (67e12, 3.35e12),
    "h200 fp32": (67e12, 4.8e12),
    "h200 fp8": (1979e12, 4.8e12),
    "b200 fp32": (75e12, 8e12),
    "b200 fp8": (4500e12, 8e12),
    "24gb fp32": (82.6e12, 1.008e12),
    "24gb fp8": (330.3e12, 1.008e12),
}
# Bytes/s of a ring inside a node, and of all links of a node to others. NVLink 2, 3, 4 and 5 carry 150, 300, 450 and 900 GB/s
# each way. Numbers behind ib, roce and efa are Gb/s of a node.
LINKS = {
    "nvlink-v100": (150e9, 12.5e9),
    "nvlink-a100 in a node": (300e9, 100e9),
    "nvlink-a100 ib-800": (300e9, 100e9),
    "nvlink-a100 roce-1600": (300e9, 200e9),
    "nvlink-h100 ib-3200": (450e9, 400e9),
    "nvlink-h100 efa-3200": (450e9, 400e9),
    "nvlink-gb200": (900e9, 400e9),
}
# The machine that this runs on, whatever it is. These rates of a CPU core are guesses, which any measurement outweighs.
HERE, GLOO, NCCL = "here", "gloo", "nccl"
DEVICES[HERE] = (80e9, 10e9)
LINKS |= {GLOO: (1.5e9, 1e9), NCCL: (100e9, 25e9)}
GUESSED, GUESSED_SPREAD = (HERE, GLOO, NCCL), 2.0
# What a user names. Inside a node, bytes/s each way of one device: NVLink's generations by NVIDIA's data sheets; PCIe's by its
# specification (x16, 128b/130b), which devices without NVLink share with the host.
INNER_LINKS = {
    "nvlink2": 150e9,
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "pcie4": 31.5e9,
    "pcie5": 63e9,
}
# Between nodes, bytes/s each way of all ports of a node together: the number is Gb/s. InfiniBand EDR is 100, HDR 200, NDR 400 and
# XDR 800 a port (InfiniBand Trade Association's roadmap); a DGX H100 has eight ports of 400, so 3200 (NVIDIA's data sheet).
OUTER_LINKS = {
    f"{kind}-{gigabits}": gigabits / 8 * 1e9
    for kind, speeds in (
        ("ib", (100, 200, 400, 800, 1600, 3200, 6400)),
        ("roce", (100, 200, 400, 800, 1600, 3200)),
        ("ethernet", (1, 10, 25, 100)),
    )
    for gigabits in speeds
}
LINKS |= {
    f"{inner} {outer}": (inner_rate, outer_rate)
    for inner, inner_rate in INNER_LINKS.items()
    for outer, outer_rate in OUTER_LINKS.items()
}
# What a device usually has inside its node, and a node of it to others (NVIDIA's data sheets of HGX and DGX boards).
USUAL_LINKS = {
    "a100-80": ("nvlink3", "ib-1600"),
    "h100-80": ("nvlink4", "ib-3200"),
    "h200": ("nvlink4", "ib-3200"),
    "b200": ("nvlink5", "ib-3200"),
    "24gb": ("pcie4", "ethernet-25"),
}
# Bytes/s of a device's bus each way: PCIe 5 from H100 on, PCIe 4 before. Of a node's NVMe disk: data sheet of a PCIe 4 drive.
NEWER_BUS, OLDER_BUS, READ, WRITE = 63e9, 31.5e9, 7e9, 5e9
# Parameters a second that AdamW steps on the host, which reads and writes some 30 bytes for each: a server's memory, 200 GB/s.
HOST_PARAMETERS = 200e9 / 30

# Share of the data sheet's rate that programs usually reach, and the spread of its logarithm.
REACHED = {FLOP: (0.65, 0.3), ATTENTION: (0.3, 0.7), MEMORY: (0.7, 0.5), INNER: (0.75, 0.5), OUTER: (0.7, 0.7)}
REACHED |= dict.fromkeys((TO_HOST, FROM_HOST, DISK_READ, DISK_WRITE, HOST_STEP), (0.7, 0.7))
# Seconds of a launch, of a message's first byte, and of what a host does once a step.
LAUNCH_S, MESSAGE_S, HOST_S = (2e-5, 0.7), (1e-5, 0.7), (3e-3, 1.5)
# An AdamW step reads and writes some 30 bytes for a parameter.
OPTIMIZER_BYTES = 30

# How far kinds deviate from their curves.
PRIORS = (
    {kind: Prior(0.15, 4.0, 0.034) for kind in KINDS}
    | {"send": Prior(0.15, 4.0, 0.02)}
    | {
        kind: Prior(0.3, 4.0, 0.05)
        for kind in (
            "block elementwise",
            "copy to host",
            "copy from host",
            "disk read",
            "disk write",
            "host optimizer",
        )
    }
    | {
        kind: Prior(0.6, 4.0, 0.02)
        for kind in (
            "all-reduce",
            "all-gather",
            "reduce-scatter",
            "gradient all-reduce",
            "gradient reduce-scatter",
            "weight all-gather",
        )
    }
)


def expected_rates(device: str, link: str) -> dict[RateName, tuple[float, float]]:
    """Return the seconds for a unit of each rate of a device and a link, with the spread of their logarithm."""
    flops, memory = DEVICES[device]
    inner, outer = LINKS[link]
    sheet = {(FLOP, device): flops, (ATTENTION, device): flops, (MEMORY, device): memory}
    sheet |= {(INNER, link): inner, (OUTER, link): outer}
    bus = NEWER_BUS if device.startswith(("h100", "h200", "b200", "gb200")) else OLDER_BUS
    sheet |= {(TO_HOST, device): bus, (FROM_HOST, device): bus, (HOST_STEP, device): HOST_PARAMETERS}
    sheet |= {(DISK_READ, device): READ, (DISK_WRITE, device): WRITE}
    rates = {name: (1 / (REACHED[name[0]][0] * rate), REACHED[name[0]][1]) for name, rate in sheet.items()}
    rates[OPTIMIZER, device] = (OPTIMIZER_BYTES / (0.7 * memory), 0.7)
    for on in (device, link):
        rates[LAUNCH, on] = LAUNCH_S
    # A guess: 64 nodes halve the bandwidth.
    rates[FAR, link] = (rates[OUTER, link][0] / 64, 0.7)
    rates[HOST, device] = HOST_S
    rates[MESSAGE, link] = MESSAGE_S
    return {(name, on): (s, GUESSED_SPREAD if on in GUESSED else spread) for (name, on), (s, spread) in rates.items()}
