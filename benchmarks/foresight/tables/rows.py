"""What a table of measured runs says: the cells of a row, the step that its stack ran, and how long it took."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gptscale.common.errors import DataError
from gptscale.foresight.time.work import StepWork


@dataclass(frozen=True)
class CellsOfRow:
    """The cells of a row by their titles. where: file and line, for errors."""

    cells: Mapping[str, str]
    where: str

    def text(self, title: str) -> str:
        """Return a cell as it is, or an empty one."""
        return (self.cells.get(title) or "").strip()

    def number(self, title: str) -> float:
        """Return a positive number. DataError for anything else."""
        try:
            value = float(self.text(title))
        except ValueError:
            value = math.nan
        if not 0 < value < 1e18:
            raise DataError(f"{title!r} is {self.text(title)[:40]!r}", self.where, "write a positive number there")
        return value

    def whole(self, title: str) -> int:
        """Return a positive whole number. DataError for anything else."""
        value = self.number(title)
        if value != int(value):
            raise DataError(f"{title!r} is {self.text(title)[:40]!r}", self.where, "write a whole number there")
        return int(value)


class MemoryParts(NamedTuple):
    """What fills a device, in numbers of elements: one tuple for each rank that may be the fullest.

    expected: bytes of each kind of element, from what the stack is known to keep.
    """

    of_ranks: tuple[tuple[float, ...], ...]
    expected: tuple[float, ...]
    capacity_gb: float


@dataclass(frozen=True)
class MeasuredRun:
    """One row of a table.

    step: what it does, None if the profile cannot describe it. seconds: of the step, None if the run failed. noise: the relative
    spread of repeated runs. cannot: why the row is refused. cannot_start: why this stack does not start it. group: rows among
    which a user chooses. tokens: of the step, on one device.
    """

    step: StepWork | None
    seconds: float | None
    noise: float = 0.01
    cannot: str = ""
    cannot_start: str = ""
    group: str = ""
    tokens: float = 1.0
    memory: MemoryParts | None = None
    measured_gb: float | None = None


@dataclass(frozen=True)
class Profile:
    """A kind of table: the stack in a few words, the columns that it needs, and how a row is read.

    places: the pairs of device and link that its rows may have. choices: whether rows are alternatives for one piece of work.
    """

    name: str
    about: str
    columns: tuple[str, ...]
    read: Callable[[CellsOfRow], MeasuredRun]
    places: tuple[tuple[str, str], ...]
    choices: bool = False
