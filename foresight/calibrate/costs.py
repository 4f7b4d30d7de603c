"""The costs of operations from a calibration: measured ones as they were measured, others by the fit to those."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from gptscale.foresight.calibrate.file import (
    SPREAD_MIN,
    CalibratedMachine,
    MeasuredMachine,
    TimedOperation,
    default_file,
    read,
)
from gptscale.foresight.time.calibration import CostTable, MeasuredStep, calibrate
from gptscale.foresight.time.operations import KINDS, kind_of
from gptscale.foresight.time.presets import PRIORS, expected_rates
from gptscale.foresight.time.simulator import Contention
from gptscale.foresight.time.work import COMPUTE, Operation, StepWork


def cost_table(
    operations: Iterable[Operation],
    device: str,
    link: str,
    file: Path | None = None,
    *,
    precision: str = "fp32",
    machine: CalibratedMachine | None = None,
) -> CostTable:
    """Return the costs of `operations` from the calibration in `file`.

    file: default is the package's own. machine: what the predicted run will be on. The measurements of the nearest machine of
    the file are taken, and the grade of a prediction says where it differs. None takes the last machine that has this device
    or link. Without measurements all costs are those of the data sheets.
    """
    needed = set(operations)
    chosen = nearest(read(file or default_file()), device, link, machine)
    timed = chosen.combined(precision) if chosen else {}
    timed = {
        operation: t for operation, t in timed.items() if operation.on in (device, link) and kind_of(operation) in KINDS
    }
    rows = [_row(t) for t in timed.values()]
    costs = calibrate(rows, needed, expected_rates(device, link), PRIORS)
    for operation, t in timed.items():
        _take(costs, operation, t)
    if chosen:
        costs.note = _difference(chosen.machine, machine) if machine else ""
        both = chosen.fact("contention of computing"), chosen.fact("contention of communicating")
        costs.contention = Contention(*(max(1.0, factor or 1.0) for factor in both))
    return costs


def nearest(
    machines: Sequence[MeasuredMachine], device: str, link: str, machine: CalibratedMachine | None
) -> MeasuredMachine | None:
    """Return the measurements that resemble `machine` most, the last of equals. None if there are none."""
    with_device = [m for m in machines if any(t.operation.on in (device, link) for t in m.operations)]
    if machine is not None:
        # Another model of CPU says nothing. Another version of torch does.
        with_device = [m for m in with_device if m.machine.device == machine.device]

    def likeness(place: int) -> tuple[int, ...]:
        measured_on = with_device[place].machine
        same = (
            [getattr(measured_on, name) == getattr(machine, name) for name in ("world", "threads", "torch")]
            if machine
            else []
        )
        return (*map(int, same), place)

    return with_device[max(range(len(with_device)), key=likeness)] if with_device else None


def _difference(measured: CalibratedMachine, machine: CalibratedMachine) -> str:
    words = {"torch": "torch {}", "threads": "{} threads", "world": "{} ranks at once"}
    differing = [name for name in words if getattr(measured, name) != getattr(machine, name)]
    return ", ".join(words[name].format(getattr(measured, name)) for name in differing)


def _row(timed: TimedOperation) -> MeasuredStep:
    step = StepWork()
    step.add(timed.operation.kind, 0, COMPUTE, {timed.operation: 1.0})
    return MeasuredStep(step, timed.seconds, max(timed.spread, SPREAD_MIN))


def _take(costs: CostTable, operation: Operation, timed: TimedOperation) -> None:
    """Put the measured seconds in the place of the fitted ones. They depend on no other operation."""
    place, spread = costs.places[operation], max(timed.spread, SPREAD_MIN)
    costs.logs[place] = math.log(timed.seconds)
    costs.covariance[place, :] = costs.covariance[:, place] = 0.0
    costs.covariance[place, place] = spread**2
