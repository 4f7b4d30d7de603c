"""Read the rows of all summaries that are compared, with what the folders of their runs say.

A damaged or foreign line becomes a row that says so, and all others are read.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError, visible
from gptscale.common.settings.checks import RUN_NAME
from gptscale.results.columns import STATUSES, SUMMARY, RunColumn, cells_of
from gptscale.results.comparison.run_files import NUMBER_MAX, DamagedFileError, clip, read_run_json, whole_lines

# A row by its columns. An empty cell is "" as a text, 0 where it counts or numbers, and NaN as a figure.
Row = dict[str, Any]
# A status that only a comparison knows: nothing but this is known of the run.
DAMAGED = "damaged"
DAMAGED_ROWS_MAX = 20
# In the row of a failed run they may be NaN or infinite.
LOSSES = ("loss_first", "loss_last")


def load(paths: Sequence[Path]) -> list[Row]:
    """Read all rows of results folders, summary files or single runs' folders.

    A run that was resumed, or repeated under its name, has several rows. Only the last counts. A row that is damaged has the
    status `damaged`. The key `folder` is the results folder that the run is in, `has_files` whether the run's own folder is
    still there, `damage` what of it cannot be read.
    """
    last: dict[tuple[str, str], Row] = {}
    for path in paths:
        for row in _read(path):
            place = row["folder"], row["run_id"]
            last.pop(place, None)
            last[place] = row
    if not last:
        raise ConfigError("there are no rows", "in compare", "run `gptscale sweep` first")
    rows = list(last.values())
    _add_run_files(rows)
    return rows


def _add_run_files(rows: Sequence[Row]) -> None:
    """Add to each row what its run's folder says, if that is still there."""
    names: dict[str, set[str]] = defaultdict(set)
    for folder in {row["folder"] for row in rows}:
        with suppress(OSError):
            names[folder] = set(os.listdir(Path(folder) / "runs"))
    for row in rows:
        row |= {"has_files": row["run_id"] in names[row["folder"]], "recipe_options": "", "damage": ""}
        if row["has_files"]:
            start = read_run_json(row["folder"], row["run_id"])
            row |= {"recipe_options": start.recipe_options, "damage": start.damage}
            # An older version hashed less of the work than this one.
            row["workload_hash"] = start.workload_hash or row["workload_hash"]


def _read(path: Path) -> Iterator[Row]:
    """Yield the rows that a path names, each with its folder."""
    is_run = path.absolute().parent.name == "runs"
    home = path.absolute().parent.parent if is_run else path
    file = home / "summary.csv" if home.is_dir() else home
    if not file.is_file():
        raise ConfigError(f"{path} holds no summary.csv", "in compare", "give a results folder or a summary.csv")
    # The folder is opened again by this name, so that it is not made printable as a cell is.
    folder = {"folder": str(file.parent.resolve())}
    with file.open("rb") as content:
        lines = whole_lines(content)
        names = cells_of(next(lines, b""))
        if missing := SUMMARY.missing(names):
            what = f"{visible(str(file))} is no summary (it has no column {missing[0]})"
            raise ConfigError(what, "in compare", "give a file that gptscale wrote")
        n_damaged = 0
        for number, line in enumerate(lines, start=2):
            cells = dict(zip(names, of_line := cells_of(line), strict=False))
            run_id = cells.get("run_id", "")
            if is_run and run_id != path.name:
                continue
            try:
                if len(of_line) != len(names):
                    raise DamagedFileError(f"{len(of_line)} cells in place of {len(names)}")
                yield _row(cells) | folder
            except DamagedFileError as error:
                n_damaged += 1
                name = run_id if RUN_NAME.fullmatch(run_id) else f"line {number}"
                if n_damaged <= DAMAGED_ROWS_MAX:
                    yield _damaged_row(name, f"line {number} of {file.name}: {error}") | folder
        if others := max(0, n_damaged - DAMAGED_ROWS_MAX):
            said = f"{file.name} has {n_damaged} lines that are no rows"
            yield _damaged_row(f"{others} more lines", said) | folder


def _row(cells: dict[str, str]) -> Row:
    """Return the values of a row, or raise DamagedFileError if it is none."""
    if not RUN_NAME.fullmatch(cells["run_id"]):
        raise DamagedFileError(f"run_id {clip(visible(cells['run_id']))!r} is no name of a run")
    if cells["status"] not in STATUSES:
        raise DamagedFileError(f"status {clip(visible(cells['status']))!r} is none of {', '.join(STATUSES)}")
    return {column.name: _value(column, cells.get(column.name, "")) for column in SUMMARY.columns}


def _value(column: RunColumn, text: str) -> str | int | float:
    """Return the value of a cell, where a text may be printed, or raise DamagedFileError."""
    if column.type is str:
        return clip(visible(text)) or column.before
    try:
        number = float(text) if text else math.nan
    except ValueError as error:
        raise DamagedFileError(clip(visible(str(error)), 100)) from None
    if (number < 0 or number > NUMBER_MAX) and column.name not in LOSSES:
        raise DamagedFileError(f"{column.name} {number} is out of range")
    if column.type is int:
        return 0 if math.isnan(number) else int(number)
    return number


def _damaged_row(run_id: str, damage: str) -> Row:
    empty = {column.name: _value(column, "") for column in SUMMARY.columns}
    return empty | {"run_id": run_id, "status": DAMAGED, "error": clip(visible(damage))}
