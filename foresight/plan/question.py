"""What is asked of a planner: a piece of work, and the machines to do it on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import SIMULATED
from gptscale.common.settings.checks import did_you_mean
from gptscale.foresight.calibrate.costs import costs_for
from gptscale.foresight.memory.constants import outside_of_torch
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.price.cost import INNER_LINKS, OUTER_LINKS, Costs

# The machine that this runs on.
HERE = "here"


@dataclass(frozen=True)
class Cluster:
    """Machines that are alike. device: a name of common/measure/gpus.csv, or HERE. links: inside a node and between nodes.

    memory: bytes of a device, or of a rank on a CPU. assumed: what the user did not say. jobs: how many share the links between
    nodes. calibration: a file of `gptscale calibrate`, None for the package's own.
    """

    device: str
    nodes: int
    per_node: int
    links: tuple[str, str]
    memory: int
    assumed: str = ""
    jobs: int = 1
    calibration: Path | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def is_cpu(self) -> bool:
        """Return whether ranks are processes on this machine's processor."""
        return self.device == HERE

    def costs(self, precision: str, torch: str = "") -> Costs:
        """Return what work costs on a GPU of them. torch: the version of a program, "" for one of today."""
        how: dict[str, Any] = {"precision": precision, "file": self.calibration, "torch": torch}
        return costs_for(self.device, self.per_node, self.links, self.jobs, **how)

    def outside(self, communicators: int) -> int:
        """Return the bytes of a device that torch does not see, 0 on a CPU."""
        return 0 if self.is_cpu else sum(constant.nbytes for constant in outside_of_torch(communicators))

    def __str__(self) -> str:
        if self.is_cpu:
            return f"{self.ranks} rank{'s' if self.ranks > 1 else ''} on this CPU"
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of " if self.nodes > 1 else ""
        shared = f", links shared by {self.jobs} jobs" if self.jobs > 1 else ""
        return f"{nodes}{self.per_node} x {self.device}, {' '.join(self.links)}{shared}"


def gpu_cluster(device: str, nodes: int, per_node: int, link: str | None) -> Cluster:
    """Return a cluster of GPUs, or raise ConfigError for a device or link that is not in the tables.

    link: names with commas between: one of what connects devices in a node, one of what connects nodes. The device's usual ones
    stand for what is left out.
    """
    memory = device_named(device, "in --device", " For this machine's processor: gptscale plan --here").memory
    inner, outer = SIMULATED[device].links
    assumed = [*([inner] if per_node > 1 else []), *([outer] if nodes > 1 else [])]
    for name in link.split(",") if link else ():
        if name not in INNER_LINKS and name not in OUTER_LINKS and name not in ("nvlink", "pcie"):
            names = ["nvlink", "pcie", *INNER_LINKS, *OUTER_LINKS]
            raise ConfigError(f"unknown link {name!r}", "in --link", did_you_mean(name, names))
        if name in OUTER_LINKS:
            assumed, outer = [one for one in assumed if one != outer], name
        else:
            # A generation that is not named is the device's own.
            of_device = inner if inner.startswith(name) else f"{name}4"
            assumed = [one for one in assumed if one != inner]
            inner = name if name in INNER_LINKS else of_device
    return Cluster(device, nodes, per_node, (inner, outer), memory, " and ".join(assumed))


def cpu_cluster(nproc: int, memory: int) -> Cluster:
    """Return the ranks of this machine. memory: bytes for all of them."""
    return Cluster(HERE, 1, nproc, ("", ""), memory // nproc)
