"""What devices and links do by their data sheets: the expectation before any measurement."""

from __future__ import annotations

from gptscale.foresight.time.calibration import Prior, RateName
from gptscale.foresight.time.operations import (
    ATTENTION,
    FAR,
    FLOP,
    HOST,
    INNER,
    KINDS,
    LAUNCH,
    MEMORY,
    MESSAGE,
    OPTIMIZER,
    OUTER,
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
# Share of the data sheet's rate that programs usually reach, and the spread of its logarithm.
REACHED = {FLOP: (0.65, 0.3), ATTENTION: (0.3, 0.7), MEMORY: (0.7, 0.5), INNER: (0.75, 0.5), OUTER: (0.7, 0.7)}
# Seconds of a launch, of a message's first byte, and of what a host does once a step.
LAUNCH_S, MESSAGE_S, HOST_S = (2e-5, 0.7), (1e-5, 0.7), (3e-3, 1.5)
# An AdamW step reads and writes some 30 bytes for a parameter.
OPTIMIZER_BYTES = 30

# How far kinds deviate from their curves.
PRIORS = (
    {kind: Prior(0.15, 4.0, 0.034) for kind in KINDS}
    | {"send": Prior(0.15, 4.0, 0.02)}
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
    rates = {name: (1 / (REACHED[name[0]][0] * rate), REACHED[name[0]][1]) for name, rate in sheet.items()}
    rates[OPTIMIZER, device] = (OPTIMIZER_BYTES / (0.7 * memory), 0.7)
    for on in (device, link):
        rates[LAUNCH, on] = LAUNCH_S
    # A guess: 64 nodes halve the bandwidth.
    rates[FAR, link] = (rates[OUTER, link][0] / 64, 0.7)
    rates[HOST, device] = HOST_S
    rates[MESSAGE, link] = MESSAGE_S
    return {(name, on): (s, GUESSED_SPREAD if on in GUESSED else spread) for (name, on), (s, spread) in rates.items()}
