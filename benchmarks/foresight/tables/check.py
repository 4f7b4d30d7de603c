"""Predict the rows of tables from other rows, and say how far off the predictions are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.foresight.tables.memory import MemoryFit, fit_memory
from benchmarks.foresight.tables.rows import MeasuredRun
from benchmarks.foresight.tables.table import MeasuredTable
from gptscale.common.errors import DataError
from gptscale.foresight.time.calibration import CostTable, MeasuredStep, calibrate
from gptscale.foresight.time.presets import PRIORS, expected_rates

# A step is refused if its standard deviation is more than so many times the spread of repeated runs.
REFUSED_ABOVE = 2.0
# 90 % of a normal distribution lies within so many standard deviations.
NINETY_PERCENT = 1.645
# A run is called fitting up to the device's capacity, and recommended up to this share of it.
MARGIN = 0.875
# Steps of more items are not calibrated on: they take long to play, and shorter ones have the same operations.
LONGEST = 2000


@dataclass(frozen=True)
class CheckedRow:
    """A row of the table with its prediction, which is None where it is refused. low_s, high_s: its interval of 90 %."""

    cells: Mapping[str, str]
    run: MeasuredRun
    predicted_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    grade: str = ""
    refused: str = ""
    predicted_gb: float | None = None

    @property
    def error(self) -> float | None:
        """Return the relative error of the seconds."""
        if self.predicted_s is None or self.run.seconds is None:
            return None
        return self.predicted_s / self.run.seconds - 1

    @property
    def fits(self) -> bool | None:
        """Return whether it is called fitting, or None where memory is not predicted."""
        return None if self.predicted_gb is None or not self.run.memory else self.used <= 1

    @property
    def used(self) -> float:
        """Return the predicted share of the device's memory."""
        return (self.predicted_gb or 0.0) / self.run.memory.capacity_gb if self.run.memory else 0.0

    @property
    def predicted_speed(self) -> float:
        """Return the predicted tokens a second on one device."""
        return self.run.tokens / self.predicted_s if self.predicted_s else 0.0

    @property
    def speed(self) -> float:
        """Return the measured tokens a second on one device, 0 for a run that failed."""
        return self.run.tokens / self.run.seconds if self.run.seconds else 0.0


@dataclass(frozen=True)
class Choice:
    """The recommended row of a group. gap: how much slower than the best measured row, 1 if it crashed."""

    group: str
    row: CheckedRow
    gap: float
    n_rows: int


def check(table: MeasuredTable, others: Sequence[MeasuredTable]) -> list[CheckedRow]:
    """Return every row of `table` with a prediction.

    With other tables, these are all that is calibrated on. Without, rows are dealt into two halves by a hash of their cells, and
    each half is predicted from the other.
    """
    if others:
        return _predicted(
            table, range(len(table.runs)), [run for other in others for run in other.runs], [table, *others]
        )
    half = [hashlib.sha256(repr(sorted(cells.items())).encode()).digest()[0] % 2 for cells in table.cells]
    rows: list[CheckedRow | None] = [None] * len(half)
    for side in (0, 1):
        places = [i for i, of_run in enumerate(half) if of_run == side]
        calibration = [run for run, of_run in zip(table.runs, half, strict=True) if of_run != side]
        for i, row in zip(places, _predicted(table, places, calibration, [table]), strict=True):
            rows[i] = row
    return [row for row in rows if row is not None]


def _predicted(
    table: MeasuredTable, places: Iterable[int], calibration: Sequence[MeasuredRun], tables: Sequence[MeasuredTable]
) -> list[CheckedRow]:
    """Predict the rows at `places` from other runs."""
    places = list(places)
    steps = [MeasuredStep(r.step, r.seconds, r.noise) for r in calibration if r.step and r.seconds]
    measured = [step for step in steps if len(step.step.items) <= LONGEST] or steps
    if not measured:
        raise DataError(
            "no row is left to calibrate on", f"in {tables[-1].path}", "give a table with more measured runs"
        )
    runs = [table.runs[i] for i in places]
    operations = {operation for run in runs if run.step for operation in run.step.operations()}
    rates: dict[tuple[str, str], tuple[float, float]] = {}
    for device, link in {place for each in tables for place in each.profile.places}:
        rates |= expected_rates(device, link)
    costs = calibrate(measured, operations, rates, PRIORS)
    memory = fit_memory(calibration)
    return [_checked(table.cells[i], table.runs[i], costs, memory) for i in places]


def _checked(cells: Mapping[str, str], run: MeasuredRun, costs: CostTable, memory: MemoryFit | None) -> CheckedRow:
    if run.step is None:
        return CheckedRow(cells, run, refused=run.cannot)
    predicted_gb = memory.gigabytes(run.memory) if memory and run.memory else None
    if run.cannot_start:
        return CheckedRow(cells, run, refused=run.cannot_start, predicted_gb=predicted_gb)
    prediction = costs.predict(run.step)
    if prediction.spread > REFUSED_ABOVE * run.noise:
        reason = f"not calibrated: {prediction.unknown} is known to {prediction.spread:.0%} only"
        return CheckedRow(cells, run, refused=reason, predicted_gb=predicted_gb)
    width = math.exp(NINETY_PERCENT * math.hypot(prediction.spread, run.noise))
    seconds = prediction.seconds
    return CheckedRow(
        cells, run, seconds, seconds / width, seconds * width, prediction.grade, predicted_gb=predicted_gb
    )


def choices(rows: Sequence[CheckedRow]) -> list[Choice]:
    """Return the recommended row of each group with a measured one: the fastest that fits with a margin."""
    choices = []
    groups: dict[str, list[CheckedRow]] = {}
    for row in rows:
        groups.setdefault(row.run.group, []).append(row)
    for group, members in groups.items():
        candidates = [row for row in members if row.predicted_s and row.used <= MARGIN]
        best = max(row.speed for row in members)
        if group and len(members) > 1 and best and candidates:
            fastest = max(candidates, key=lambda row: row.predicted_speed)
            # Rows that repeat a configuration have one prediction. Those that ran say how fast it is.
            repeats = [row for row in candidates if row.predicted_s == fastest.predicted_s and row.used == fastest.used]
            recommended = max(repeats, key=lambda row: row.speed)
            choices.append(Choice(group, recommended, 1 - recommended.speed / best, len(members)))
    return choices


def percentiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Return median, 95th percentile and largest of absolute values."""
    sizes = np.abs(list(values))
    median, p95, worst = np.percentile(sizes, [50, 95, 100])
    return float(median), float(p95), float(worst)
