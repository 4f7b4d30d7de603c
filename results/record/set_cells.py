"""Cells of a row that are known only after the run wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptscale.results.columns import cell, cells_of, csv_line
from gptscale.results.record.files import locked, opened, replace_file


def set_cells(path: Path, run_id: str, cells: Mapping[str, Any]) -> bool:
    """Replace cells in the last row of a run in a CSV that many runs share, and return whether it has such a row.

    The file is replaced in one move under its lock. All other bytes stay as they are, and so does a row that is not as
    `append_row` writes it. Cells without a column are left out. Raises StorageError as `append_row` does.
    """
    if not path.exists():
        return False
    with locked(path):
        with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            header, *lines = file.read().split(b"\n")
        columns = cells_of(header)
        # Behind the last newline nothing stands, or a row that is torn.
        for place, line in reversed(list(enumerate(lines[:-1]))):
            row = dict(zip(columns, cells_of(line), strict=False)) if run_id.encode() in line else {}
            if row.get("run_id") == run_id and len(row) == len(columns) and csv_line(row.values()) == line + b"\n":
                row |= {name: cell(value) for name, value in cells.items() if name in row}
                lines[place] = csv_line(row.values())[:-1]
                replace_file(path, b"\n".join([header, *lines]))
                return True
    return False
