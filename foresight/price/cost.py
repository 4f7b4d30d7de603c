"""The price of work on a device: what its data sheet promises, and the share of it that programs reach."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from gptscale.common.measure.gpus import SIMULATED, Gpu
from gptscale.foresight.price.record import MESSAGES, Work

# Tiles of a product's result that one multiprocessor computes at once, and the share of the largest tile's rate that each
# reaches. A smaller one is taken where the larger ones leave multiprocessors idle.
TILES = (((256, 128), 1.0), ((128, 128), 0.93), ((128, 64), 0.75), ((64, 64), 0.55))
# Seconds of the shortest kernel.
KERNEL_S = 2.5e-6
# Seconds that a collective takes to start, of a turn of a ring in a node, and of one between nodes: NCCL's constants for rings
# by its protocol Simple (NVIDIA/nccl, src/graph/tuning.cc).
START_S, TURN_S, HOP_S = 2.5e-5, 3.4e-6, 1.4e-5
# Bytes that each thread of a kernel reads and writes of which nothing else is known: a few numbers.
THREAD_BYTES = 32
# Operations of torch whose kernels move numbers to other places or sum over rows, and the bytes a second of one multiprocessor
# in them, which no memory can raise: an H200's (docs/measurements/gpu.md).
SCATTERED = frozenset(("clone", "constant_pad_nd", "native_layer_norm", "native_layer_norm_backward", "stack", "sum"))
PROCESSOR_BYTES = 1.08e10
# How much longer a kernel takes while a collective uses some of the multiprocessors and the memory.
BESIDE = 1.12


@dataclass(frozen=True)
class Reached:
    """The shares of a data sheet that programs reach: of the rates of products and attention, of memory, links and the bus.

    inner: the inner size with which products of 16 bits reach half of their share. Shorter ones fill and empty the pipeline.
    It takes as long in any precision, and so a smaller part of slower products. step: the operations of attention for each of
    its bytes, which grow with the sequence, of which it reaches half of its share (H200).
    """

    products: float
    attention: float
    inner: int = 512
    step: float = 150
    memory: float = 0.7
    inside: float = 0.75
    outside: float = 0.7
    bus: float = 0.8


# By capability. 8.0 was fitted by hand to rows of llm-foundry's table (docs/measurements/step-times.md); 8.6 and 8.9 are taken to
# be alike. 9.0 and 10.0 have the most that torch 2.7 reached in any product on an H100 and a B200 (stas00/ml-engineering,
# compute/accelerator, MAMF). 7 is a guess, and so is attention on 10.
REACHED = {7: Reached(0.75, 0.35), 8: Reached(0.8, 0.55), 9: Reached(0.8, 0.36, 64), 10: Reached(0.776, 0.35, 64)}
# Hopper under an older torch, and of 500 W: fitted by hand to the same rows, and to torchtitan's.
HOPPER_BEFORE, TORCH_SINCE, LESS_POWER = Reached(0.6, 0.36), (2, 7), "h100-96"
# Torch's attention is FlashAttention 2 since then, which multiplies twice as fast as the first (Dao 2023, arXiv 2307.08691).
FLASH_2_SINCE = (2, 2)


@dataclass(frozen=True)
class Costs:
    """A device and its links.

    links: names of links.csv, inside a node and between nodes. per_node: devices of one machine. jobs: how many share the
    links between nodes. speed: by how much the device is faster than what programs usually reach, as one measured step tells.
    """

    gpu: Gpu
    reached: Reached
    links: tuple[str, str]
    per_node: int = 8
    jobs: int = 1
    speed: float = 1.0
    # How costs are known.
    grade: ClassVar[str] = "data sheet"

    def seconds(self, work: Work) -> float:
        """Return how long a piece of work takes by itself."""
        if work.kind == "collective":
            return self._collective(work)
        if work.kind == "copy":
            inside = work.name in ("device to device", "2d", "default")
            rate = self._memory() / 2 if inside else self.gpu.bus * self.reached.bus
            return KERNEL_S + (work.nbytes or 0) / rate
        if work.kind in ("host", "disk"):
            # The ranks of a machine share its memory and its disk.
            return self.per_node * (work.nbytes or 0) / (HOST_MEMORY if work.kind == "host" else DISK[work.name])
        if work.kind == "set":
            return KERNEL_S + (work.nbytes or 0) / self._memory()
        nbytes, rate = work.threads * THREAD_BYTES if work.nbytes is None else work.nbytes, self._memory()
        if work.name in SCATTERED and self.gpu.properties:
            rate = min(rate, self.speed * PROCESSOR_BYTES * self.gpu.properties.multiprocessors)
        return KERNEL_S + max(nbytes / rate, self._arithmetic(work))

    def together(self, works: Sequence[Work]) -> float:
        """Return how long a collective takes, or messages that start at once. What is sent crosses what is received."""
        if len(works) == 1:
            return self.seconds(works[0])
        ways = {work.name: 0.0 for work in works}
        for work in works:
            ways[work.name] += max(0.0, self.seconds(work) - START_S)
        return START_S + max(ways.values())

    def peak(self, precision: str) -> float:
        """Return the data sheet's floating-point operations a second. TF32 has half the rate of 16 bits."""
        rates: Mapping[str, float] = self.gpu.tflops
        if precision == "tf32":
            return 0.5e12 * rates["fp16"]
        if precision == "fp64":
            return 0.5e12 * rates["fp32"]
        return 1e12 * rates.get(precision, rates.get("bf16", rates["fp16"]))

    def _memory(self) -> float:
        return self.speed * self.gpu.memory * self.reached.memory

    def _arithmetic(self, work: Work) -> float:
        if not work.flops:
            return 0.0
        if work.is_attention:
            alone = work.flops / (self.speed * self.peak(work.precision) * self.reached.attention)
            return alone * (1 + self.reached.step * (work.nbytes or 0) / work.flops)
        peak = self.peak(work.precision)
        inner = self.reached.inner * peak / self.peak("bf16")
        return work.flops / (self.speed * peak * self.reached.products * self._filled(work.sizes, inner))

    def _filled(self, sizes: tuple[int, int, int, int], inner: float) -> float:
        """Return the share of the rate that a product of these sizes reaches: its tiles may not fill the multiprocessors."""
        m, n, k, count = sizes
        if not m or self.gpu.properties is None:
            return 1.0
        processors = self.gpu.properties.multiprocessors
        best = 1e-6
        for (high, wide), share in TILES:
            for rows, columns in ((m, n), (n, m)):
                tiles = math.ceil(rows / high) * math.ceil(columns / wide) * count
                useful = rows * columns * count / (tiles * high * wide)
                waves = tiles / processors
                best = max(best, share * useful * waves / math.ceil(waves))
        return best * k / (k + inner)

    def _collective(self, work: Work) -> float:
        """Return the seconds of a ring: each rank sends its part of the tensor around, twice for an all-reduce."""
        ranks, nbytes = work.ranks, work.nbytes or 0.0
        inside, outside = INNER_LINKS[self.links[0]], OUTER_LINKS[self.links[1]] / self.jobs
        own = min(ranks, work.on_node or self.per_node)
        near, far = inside * self.reached.inside, outside / self.per_node * self.reached.outside
        if work.name in MESSAGES:
            # In a group ranks of a machine stand side by side. What a rank sends to itself crosses no link.
            me, other = work.sizes[:2]
            return START_S + (nbytes / (near if me // own == other // own else far) if me != other else 0.0)
        if ranks < 2:
            return KERNEL_S
        if work.name == "all-to-all":
            return START_S + nbytes / ranks * max((own - 1) / near, (ranks - own) / far)
        turns = 2 if work.name == "all-reduce" else 1
        sent = turns * nbytes * (ranks - 1) / ranks
        if own == ranks:
            return START_S + turns * (ranks - 1) * TURN_S + sent / (inside * self.reached.inside)
        # Groups whose ranks lie apart share the links of a machine.
        shared = outside * self.reached.outside * own / self.per_node
        return START_S + (ranks // own - 1) * turns * HOP_S + max(sent / shared, sent / (inside * self.reached.inside))


def costs_of(
    name: str, per_node: int = 8, links: tuple[str, str] | None = None, jobs: int = 1, torch: str = ""
) -> Costs:
    """Return what work costs on a device of the table of GPUs, by its data sheet.

    links: None for those that it usually has. torch: the version that a program has, "" for one of today.
    """
    gpu = SIMULATED[name]
    assert gpu.properties is not None
    kind = gpu.properties.capability[0]
    version = (*map(int, re.findall(r"\d+", torch)[:2]),) or TORCH_SINCE
    reached = HOPPER_BEFORE if kind == 9 and (version < TORCH_SINCE or name == LESS_POWER) else REACHED[kind]
    if version < FLASH_2_SINCE:
        reached = replace(reached, attention=reached.attention / 2, step=reached.step / 2)
    return Costs(gpu, reached, links or gpu.links, per_node, jobs)


# Bytes a second each way: of one device inside a node, or of all ports of a node together, whose name has their Gb/s.
_LINKS = [*csv.DictReader(Path(__file__).with_name("links.csv").read_text().splitlines())]
INNER_LINKS, OUTER_LINKS = (
    {row["name"]: float(row["rate_b_s"]) for row in _LINKS if row["where"] == where} for where in ("inside", "outside")
)
# Bytes/s that a node's NVMe disk reads and writes: Samsung 980 PRO data sheet, 2020 (PCIe 4).
DISK = {"read": 7e9, "write": 5e9}
# Bytes/s of a node's own memory: eight channels of DDR4-3200 (JEDEC JESD79-4).
HOST_MEMORY = 200e9


def sources_of(device: str, links: tuple[str, str]) -> list[str]:
    """Return where the figures of a device and of its links are from."""
    named = {device: SIMULATED[device].source} | {row["name"]: row["source"] for row in _LINKS if row["name"] in links}
    return [f"{name}: {source}" for name, source in named.items()]
