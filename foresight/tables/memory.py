"""Bytes for the elements on a device, calibrated on measured runs: what the closed forms of other stacks need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptscale.foresight.tables.rows import MeasuredRun, MemoryParts

ROUNDS = 10


@dataclass(frozen=True)
class MemoryFit:
    """Bytes of each kind of element."""

    bytes_each: Any

    def gigabytes(self, parts: MemoryParts) -> float:
        """Return the memory of the fullest rank."""
        return float((np.array(parts.of_ranks) @ self.bytes_each).max() / 1e9)


def fit_memory(runs: Sequence[MeasuredRun]) -> MemoryFit | None:
    """Return the bytes that explain the measured runs best, or None if none tells its memory.

    Relative errors count. Which rank is the fullest follows from the bytes, so both are found in turn. Bytes are not negative.
    """
    known = [(run.memory, run.measured_gb) for run in runs if run.memory and run.measured_gb]
    if len(known) < 10:
        return None
    elements = np.array([memory.of_ranks for memory, _ in known])
    target = np.array([gb for _, gb in known])
    bytes_each = np.full(elements.shape[2], 4.0)
    for _ in range(ROUNDS):
        fullest = (elements @ bytes_each).argmax(axis=1)
        rows = elements[np.arange(len(known)), fullest] / target[:, None] / 1e9
        bytes_each = _non_negative(rows)
    return MemoryFit(bytes_each)


def _non_negative(rows: Any) -> Any:
    """Return the least-squares solution of rows @ x = 1 among those that are not negative, without its negative columns."""
    kept = np.arange(rows.shape[1])
    while True:
        found = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all():
            whole = np.zeros(rows.shape[1])
            whole[kept] = found
            return whole
        kept = kept[found > found.min()] if found.min() < 0 else kept
