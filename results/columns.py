"""The columns of summary.csv, each a row of columns.csv, from which header, reader, comparison and page of docs are made."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

STEP_COLUMNS = "step tokens loss grad_norm lr step_time_s data_wait_s".split()
STATUSES = ("ok", "oom", "failed", "interrupted")

# A spreadsheet runs a text that begins so as a formula (OWASP, CSV injection; CWE-1236).
FORMULA_STARTS = tuple("=+-@\t\r")


@dataclass(frozen=True)
class RunColumn:
    """A column of a table with a row for each run.

    type: str, int for what counts or numbers, float for what is measured. unit and doc: what the page of metrics says.
    since: the first version of the table that has the column. before: what its absence means in a row of an earlier version.
    source: which part of a run fills it. tests/launchers/run/test_record.py compares the keys of each part with its columns.
    title, form, scale: how a comparison shows the figure, without a title for one that is not in its table.
    """

    name: str
    type: type[str | int | float] = float
    unit: str = ""
    since: int = 1
    before: str = ""
    source: str = ""
    title: str = ""
    form: str = ""
    scale: float = 1.0
    doc: str = ""

    def shown(self, value: float | None) -> str:
        """Return a figure as a comparison shows it, a dash for a missing one."""
        return "-" if value is None else format(value * self.scale, self.form)


@dataclass(frozen=True)
class RunTable:
    """A CSV with a row for each run: the name of its file, and its columns in their order."""

    file: str
    columns: tuple[RunColumn, ...]

    @cached_property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @cached_property
    def version(self) -> int:
        return max(column.since for column in self.columns)

    @cached_property
    def header(self) -> bytes:
        return csv_line(self.names)

    def __getitem__(self, name: str) -> RunColumn:
        return self.columns[self.names.index(name)]

    def of_type(self, *types: type) -> list[str]:
        return [column.name for column in self.columns if column.type in types]

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """Return the cells of a row, empty for columns that it lacks.

        Raises ValueError for a key that is no column, and for an unknown status.
        """
        if unknown := set(row) - set(self.names):
            raise ValueError(f"not columns of {self.file}: {sorted(unknown)}")
        if row.get("status") not in STATUSES:
            raise ValueError(f"status {row.get('status')!r} is none of {STATUSES}")
        values = {"schema_version": self.version, **row}
        return [cell(values.get(name)) for name in self.names]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the columns that every version has and that `names`, those of a file, lack."""
        return [column.name for column in self.columns if column.since == 1 and column.name not in set(names)]

    def fault(self, header: bytes) -> str:
        """Return why rows cannot be appended to a file with this first line, empty if they can be.

        They can be if the file is empty, of this version, or of an earlier one, whose columns are a part of these.
        """
        names = cells_of(header)
        if self.header.startswith(header):
            # It is whole, or there is nothing, or a torn line that is written anew.
            return ""
        if self.missing(names) or len(set(names)) < len(names):
            return "has other columns"
        newer = [name for name in names if name not in self.names]
        return f"is of a newer gptscale (it has the column {newer[0]})" if newer else ""

    def extended(self, content: bytes) -> bytes:
        """Return the lines of a file of an earlier version under today's header, with empty cells for new columns.

        content: whole lines, of which `fault` finds nothing to say of the first.
        A line with more or fewer cells than its header is damaged and stays as it is.
        """
        header, *lines, _ = content.split(b"\n")
        names = cells_of(header)
        result = [self.header]
        for line in lines:
            cells = cells_of(line)
            if len(cells) == len(names):
                row = dict(zip(names, cells, strict=True))
                result.append(csv_line(row.get(name, "") for name in self.names))
            else:
                result.append(line + b"\n")
        return b"".join(result)


def cell(value: Any) -> str:
    """Write a value as a CSV cell.

    Numbers read back exactly, None is empty, text is on one line and never a formula.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        # The shortest digits that read back as the same float.
        return repr(float(value))
    text = "".join(c if c.isprintable() else " " for c in str(value))
    dangerous = str(value).startswith(FORMULA_STARTS) or text.lstrip().startswith(FORMULA_STARTS)
    return "'" + text if dangerous else text


def csv_line(cells: Iterable[str]) -> bytes:
    """Return the cells as one CSV line with its newline."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def cells_of(line: bytes) -> list[str]:
    """Return the cells of a line, none if it is no line of a CSV."""
    try:
        if b'"' not in line:
            return line.decode().rstrip("\r\n").split(",")
        return next(csv.reader([line.decode().rstrip("\r\n")]), []) if b"\0" not in line else []
    except (ValueError, csv.Error):
        return []


def read_columns(file: Path) -> tuple[RunColumn, ...]:
    """Return the columns that a table of columns defines, one in each row."""
    types: dict[str, Any] = {"str": str, "int": int, "float": float}
    with file.open(newline="", encoding="utf-8") as rows:
        cells: list[dict[str, Any]] = list(csv.DictReader(rows))
    for row in cells:
        row |= {"type": types[row["type"]], "since": int(row["since"]), "scale": float(row["scale"] or 1)}
    return tuple(RunColumn(**row) for row in cells)


SUMMARY = RunTable("summary.csv", read_columns(Path(__file__).with_name("columns.csv")))
