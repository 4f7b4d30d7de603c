"""What devices and links are expected to do before any measurement: the share of their data sheets that programs reach."""

from __future__ import annotations

from gptscale.foresight.price import cost
from gptscale.foresight.time.calibration import Prior, RateName
from gptscale.foresight.time.data_sheets import (
    DEVICES,
    DISK_READS,
    DISK_WRITES,
    GLOO,
    HERE,
    HOST_PARAMETERS,
    LINKS,
    NCCL,
    of_its_kind,
)
from gptscale.foresight.time.operations import (
    ATTENTION,
    DISK_READ,
    DISK_WRITE,
    FLOP,
    FROM_HOST,
    HOP,
    HOST,
    HOST_STEP,
    INNER,
    KINDS,
    LAUNCH,
    MEMORY,
    MESSAGE,
    OPTIMIZER,
    OUTER,
    STAGE,
    TO_HOST,
)

GUESSED, GUESSED_SPREAD = (HERE, GLOO, NCCL), 2.0
# Share of the data sheet's rate that programs usually reach, and the spread of its logarithm.
REACHED = {FLOP: (0.65, 0.3), ATTENTION: (0.3, 0.7), MEMORY: (0.7, 0.5), INNER: (0.75, 0.5), OUTER: (0.7, 0.7)}
REACHED |= dict.fromkeys((TO_HOST, FROM_HOST, DISK_READ, DISK_WRITE, HOST_STEP), (0.7, 0.7))
# Seconds of a message's first byte in a node and between nodes.
MESSAGE_S, HOP_S = (cost.TURN_S, 0.7), (cost.HOP_S, 0.7)
# Seconds of a launch, of what a host does once a step, and of a turn of a stage. These are guesses.
LAUNCH_S, HOST_S, STAGE_S = (2e-5, 0.7), (3e-3, 1.5), (4e-4, 1.5)
# An AdamW step reads and writes some 30 bytes for a parameter.
OPTIMIZER_BYTES = 30

# How far kinds deviate from their curves.
PRIORS = (
    {kind: Prior(0.15, 4.0, 0.034) for kind in KINDS}
    | {"send": Prior(0.15, 4.0, 0.02)}
    | {
        kind: Prior(0.3, 4.0, 0.05)
        for kind in ("block elementwise", "copy to host", "copy from host", "disk read", "disk write", "host optimizer")
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
    of_device = DEVICES[of_its_kind(device)]
    inner, outer = LINKS[of_its_kind(link)]
    sheet = {(FLOP, device): of_device.flops, (ATTENTION, device): of_device.flops, (MEMORY, device): of_device.memory}
    sheet |= {(INNER, link): inner, (OUTER, link): outer}
    sheet |= {
        (TO_HOST, device): of_device.bus,
        (FROM_HOST, device): of_device.bus,
        (HOST_STEP, device): HOST_PARAMETERS,
    }
    sheet |= {(DISK_READ, device): DISK_READS, (DISK_WRITE, device): DISK_WRITES}
    rates = {name: (1 / (REACHED[name[0]][0] * rate), REACHED[name[0]][1]) for name, rate in sheet.items()}
    rates[OPTIMIZER, device] = (OPTIMIZER_BYTES / (0.7 * of_device.memory), 0.7)
    for on in (device, link):
        rates[LAUNCH, on] = LAUNCH_S
    rates[HOST, device], rates[STAGE, device] = HOST_S, STAGE_S
    rates[MESSAGE, link], rates[HOP, link] = MESSAGE_S, HOP_S
    return {(name, on): (s, GUESSED_SPREAD if on in GUESSED else spread) for (name, on), (s, spread) in rates.items()}
