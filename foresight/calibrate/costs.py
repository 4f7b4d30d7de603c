"""What work costs on a machine that was measured: as it was measured, and between the measured sizes by a straight line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gptscale.common.measure.gpus import SIMULATED
from gptscale.foresight.calibrate.file import (
    CalibratedMachine,
    MeasuredMachine,
    Operation,
    TimedOperation,
    default_file,
    read,
)
from gptscale.foresight.price.cost import KERNEL_S, SCATTERED, Costs, costs_of
from gptscale.foresight.price.record import Work

# Seconds by sizes, smallest first.
Curve = tuple[Sequence[float], Sequence[float]]


def at(curve: Curve, size: float) -> float:
    """Return the seconds of a size. Beyond the measured ones, seconds are in proportion."""
    sizes, seconds = curve
    if size > sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return math.exp(float(np.interp(math.log(max(size, 1.0)), np.log(sizes), np.log(seconds))))


def curves_of(timed: Mapping[Operation, TimedOperation]) -> dict[tuple[str, tuple[int, ...]], Curve]:
    """Return seconds by bytes of each collective by its ranks, and by operations or bytes of all else."""
    points: dict[tuple[str, tuple[int, ...]], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for operation, time in timed.items():
        # The shape of a collective is its bytes and its ranks.
        ranks = operation.shape[1:] if operation.kind in ("all-reduce", "all-gather", "reduce-scatter", "send") else ()
        points[operation.kind, ranks][size_of(operation)].append(time.seconds)
    for of_kind in (of_kind for (_, ranks), of_kind in points.items() if not ranks):
        # Smaller work takes its share of the smallest that was measured, which is far longer than a launch.
        of_kind[1.0] = [seconds / min(of_kind) for seconds in of_kind[min(of_kind)]]
    return {
        key: (sizes := sorted(of_kind), [sum(of_kind[size]) / len(of_kind[size]) for size in sizes])
        for key, of_kind in points.items()
    }


def size_of(operation: Operation) -> float:
    """Return the floating-point operations of a product or of causal attention, or the bytes of anything else."""
    if operation.kind == "product":
        return 2.0 * math.prod(operation.shape)
    if operation.kind.startswith("attention"):
        tokens, numbers, _, seq_len = operation.shape
        return 2.0 * tokens * numbers * seq_len * (2.5 if operation.kind.endswith("backward") else 1)
    return float(operation.shape[0])


@dataclass(frozen=True)
class MeasuredCosts(Costs):
    """A device that was measured. What was not is priced from its data sheet.

    curves: seconds by size, of each kind of work by the ranks that do it together, in one precision.
    """

    curves: Mapping[tuple[str, tuple[int, ...]], Curve] = field(default_factory=dict)
    precision: str = ""
    grade: ClassVar[str] = "calibrated"

    def seconds(self, work: Work) -> float:
        nbytes = work.nbytes or 0.0
        if work.kind == "collective":
            name = "send" if work.name == "receive" else work.name
            own = min(work.ranks, work.on_node or self.per_node)
            curve = self.curves.get((name, (work.ranks, own)))
            return at(curve, nbytes) if curve else super().seconds(work)
        if work.kind == "copy" and work.name in ("host to device", "device to host") and ("copy", ()) in self.curves:
            return KERNEL_S + at(self.curves["copy", ()], nbytes)
        if work.flops and work.precision == self.precision:
            way = "backward" if "backward" in work.name else "forward"
            curve = self.curves.get((f"attention {way}" if work.is_attention else "product", ()))
            if curve:
                return KERNEL_S + at(curve, work.flops)
        if ("pass", ()) in self.curves and work.kind in ("kernel", "set") and work.nbytes is not None:
            return max(KERNEL_S + at(self.curves["pass", ()], nbytes), super().seconds(work) * (work.name in SCATTERED))
        return super().seconds(work)


def nearest(machines: Sequence[MeasuredMachine], machine: CalibratedMachine) -> MeasuredMachine | None:
    """Return the measurements that resemble `machine` most, the last of equals. Those of another device say nothing."""
    # `max` takes the first of equals.
    alike = (m for m in reversed(machines) if m.machine.device == machine.device)
    names = ("world", "threads", "torch")
    return max(alike, key=lambda m: [getattr(m.machine, n) == getattr(machine, n) for n in names], default=None)


def costs_for(
    device: str,
    per_node: int = 8,
    links: tuple[str, str] | None = None,
    jobs: int = 1,
    *,
    precision: str = "bf16",
    file: Path | None = None,
    torch: str = "",
) -> Costs:
    """Return what work costs on a GPU: as the calibration in `file` (None: the package's own) has it, or by its data sheet."""
    by_sheet = costs_of(device, per_node, links, jobs, torch)
    properties = SIMULATED[device].properties
    assert properties is not None
    machines = [m for m in read(file or default_file()) if m.machine.device == properties.name]
    if not machines:
        return by_sheet
    curves = curves_of(machines[-1].combined(precision))
    return MeasuredCosts(**vars(by_sheet), curves=curves, precision=precision)
