"""Bytes for the elements on a device, calibrated on measured runs: what the closed forms of other stacks need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.foresight.tables.rows import MeasuredRun, MemoryParts

ROUNDS = 10
# Weight of one expected figure beside one measured run.
TRUST = 0.3


@dataclass(frozen=True)
class MemoryFit:
    """Bytes of each kind of element."""

    bytes_each: Any

    def gigabytes(self, parts: MemoryParts) -> float:
        """Return the memory of the fullest rank."""
        return float((np.array(parts.of_ranks) @ self.bytes_each).max() / 1e9)


def fit_memory(runs: Sequence[MeasuredRun]) -> MemoryFit | None:
    """Return the bytes that explain the measured runs best, or None if the table has no memory.

    Relative errors count. Which rank is the fullest follows from the bytes, so both are found in turn. Bytes are not negative.
    """
    expected = next((np.array(run.memory.expected) for run in runs if run.memory), None)
    if expected is None:
        return None
    measured = [(run.memory.of_ranks, run.measured_gb) for run in runs if run.memory and run.measured_gb]
    if not measured:
        return MemoryFit(expected)
    bytes_each, prior = expected, TRUST * np.diag(1 / expected)
    elements = np.array([of_ranks for of_ranks, _ in measured])
    target = np.array([gb for _, gb in measured])
    for _ in range(ROUNDS):
        fullest = (elements @ bytes_each).argmax(axis=1)
        rows = elements[np.arange(len(measured)), fullest] / target[:, None] / 1e9
        bytes_each = _non_negative(np.vstack([rows, prior]), np.repeat([1.0, TRUST], [len(measured), len(expected)]))
    return MemoryFit(bytes_each)


def _non_negative(rows: Any, right: Any) -> Any:
    """Return the least-squares solution of rows @ x = right with the columns left out that would be negative."""
    columns = np.arange(rows.shape[1])
    while True:
        solution = np.linalg.lstsq(rows[:, columns], right, rcond=None)[0]
        if (solution >= 0).all():
            coefficients = np.zeros(rows.shape[1])
            coefficients[columns] = solution
            return coefficients
        columns = columns[solution > solution.min()] if solution.min() < 0 else columns
