"""Read the rows of summaries. A damaged or foreign row becomes a row that says so, and all others are read."""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptscale.common.errors import ConfigError, visible
from gptscale.common.settings.checks import RUN_NAME
from gptscale.results.comparison.run_files import (
    NUMBER_MAX,
    DamagedFileError,
    RunStart,
    clip,
    read_run_json,
    whole_lines,
)
from gptscale.results.record.columns import NEW_SINCE_1, STATUSES, SUMMARY_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

TEXT = (
    "run_id timestamp status error recipe engine engine_version model precision activation_checkpointing compile "
    "optimizer_state offload data device host torch_version git_commit workload_hash"
).split()
NUMBERS = [column for column in SUMMARY_COLUMNS if column not in TEXT]
INTEGERS = (
    "n_params seq_len vocab_size world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps global_batch_size steps "
    "seed"
).split()
# Of a run that failed they may be NaN or infinite.
LOSSES = ("loss_first", "loss_last")
STATUS, OPTIMIZER_STATE = TEXT.index("status"), TEXT.index("optimizer_state")
# A status that only a comparison knows: nothing but this is known of the run.
DAMAGED = "damaged"

DAMAGED_ROWS_MAX, EQUAL_TEXTS_MAX = 20, 10_000


class SummaryRows:
    """The rows of summary files by columns, because a million rows as objects would fill the memory."""

    def __init__(self) -> None:
        self.text: dict[str, list[str]] = {column: [] for column in (*TEXT, "folder")}
        self.numbers = {column: array("d") for column in NUMBERS}
        # What to show for each text that was met. Equal ones are kept once.
        self._shown: dict[str, str] = {"": ""}

    def shown(self, text: str) -> str:
        """Return text as it may be printed."""
        shown = self._shown.get(text)
        if shown is None:
            shown = clip(visible(text))
            if len(self._shown) < EQUAL_TEXTS_MAX:
                self._shown[text] = shown
        return shown

    def add(self, texts: Iterable[str], folder: str, numbers: Iterable[float]) -> None:
        """Append a row, with texts and numbers in the order of TEXT and NUMBERS."""
        for values, text in zip(self.text.values(), (*texts, folder), strict=True):
            values.append(text)
        for figures, number in zip(self.numbers.values(), numbers, strict=True):
            figures.append(number)

    def add_damaged(self, run_id: str, folder: str, damage: str) -> None:
        """Append a row that says only what is wrong with it."""
        row = {"run_id": run_id, "status": DAMAGED, "error": damage}
        self.add([row.get(column, "") for column in TEXT], folder, [math.nan] * len(NUMBERS))

    def frame(self) -> pd.DataFrame:
        """Return the rows as a table, of which only the last of each run counts."""
        import numpy as np
        import pandas as pd

        columns: dict[str, Any] = {name: np.array(self.text.pop(name), dtype=object) for name in list(self.text)}
        columns |= {name: np.frombuffer(figures) for name, figures in self.numbers.items() if name not in INTEGERS}
        columns |= {name: np.nan_to_num(np.frombuffer(self.numbers[name])).astype(np.int64) for name in INTEGERS}
        rows = pd.DataFrame(columns)
        earlier = rows.duplicated(["folder", "run_id"], keep="last")
        return rows[~earlier].reset_index(drop=True) if earlier.any() else rows


def load(paths: Sequence[Path]) -> pd.DataFrame:
    """Read all rows of results folders, summary files or single runs' folders.

    A run that was resumed, or repeated under its name, has several rows. Only the last counts. A row that is damaged has the
    status `damaged`. The column `folder` is the results folder that the run is in, `has_files` whether the run's own folder is
    still there, `damage` what of it cannot be read.
    """
    rows = SummaryRows()
    for path in paths:
        _read(path, rows)
    if not rows.text["run_id"]:
        raise ConfigError("there are no rows", "in compare", "run `gptscale sweep` first")
    frame = rows.frame()
    # Most rows of a large summary have no folder any more.
    folders = {folder: _names_in(Path(folder) / "runs") for folder in frame.folder.unique()}
    runs = list(zip(frame.folder, frame.run_id, strict=True))
    has_files = [run_id in folders[folder] for folder, run_id in runs]
    gone = RunStart()
    starts = [read_run_json(*run) if has else gone for run, has in zip(runs, has_files, strict=True)]
    options, damages = [start.recipe_options for start in starts], [start.damage for start in starts]
    return frame.assign(recipe_options=options, damage=damages, has_files=has_files)


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _read(path: Path, rows: SummaryRows) -> None:
    is_run = path.absolute().parent.name == "runs"
    home = path.absolute().parent.parent if is_run else path
    file = home / "summary.csv" if home.is_dir() else home
    if not file.is_file():
        raise ConfigError(f"{path} holds no summary.csv", "in compare", "give a results folder or a summary.csv")
    folder, n_damaged = str(file.parent.resolve()), 0
    with file.open("rb") as content:
        lines = whole_lines(content)
        columns = Columns.of(_cells(next(lines, b"")), file)
        for number, line in enumerate(lines, start=2):
            cells = _cells(line)
            run_id = cells[columns.run_id] if len(cells) > columns.run_id else ""
            if is_run and run_id != path.name:
                continue
            try:
                texts, numbers = columns.parse(cells, rows.shown)
                rows.add(texts, folder, numbers)
            except DamagedFileError as error:
                n_damaged += 1
                if n_damaged <= DAMAGED_ROWS_MAX:
                    name = run_id if RUN_NAME.fullmatch(run_id) else f"line {number}"
                    rows.add_damaged(name, folder, f"line {number} of {file.name}: {error}")
    if (others := n_damaged - DAMAGED_ROWS_MAX) > 0:
        rows.add_damaged(f"{others} more lines", folder, f"{file.name} has {n_damaged} lines that are no rows")


class Columns(NamedTuple):
    """Where the columns of a comparison are in the lines of a summary, None for one that its version lacks."""

    n: int
    run_id: int
    text: list[int | None]
    numbers: list[int | None]

    @classmethod
    def of(cls, header: Sequence[str], file: Path) -> Columns:
        """Find the columns, or raise ConfigError for a file that is no summary."""
        if missing := [c for c in SUMMARY_COLUMNS if c not in header and c not in NEW_SINCE_1]:
            what = f"{visible(str(file))} is no summary (it has no column {missing[0]})"
            raise ConfigError(what, "in compare", "give a file that gptscale wrote")
        at = {column: i for i, column in enumerate(header)}
        return cls(len(header), at["run_id"], [at.get(c) for c in TEXT], [at.get(c) for c in NUMBERS])

    def parse(self, cells: Sequence[str], shown: Callable[[str], str]) -> tuple[list[str], list[float]]:
        """Return the texts and the numbers of a row, or raise DamagedFileError if it is none."""
        if len(cells) != self.n:
            raise DamagedFileError(f"{len(cells)} cells in place of {self.n}")
        texts = ["" if i is None else shown(cells[i]) for i in self.text]
        try:
            numbers = [math.nan if i is None or not cells[i] else float(cells[i]) for i in self.numbers]
        except ValueError as error:
            raise DamagedFileError(clip(visible(str(error)), 100)) from None
        for column, number in zip(NUMBERS, numbers, strict=True):
            if (number < 0 or number > NUMBER_MAX) and column not in LOSSES:
                raise DamagedFileError(f"{column} {number} is out of range")
        if not RUN_NAME.fullmatch(cells[self.run_id]):
            raise DamagedFileError(f"run_id {texts[0]!r} is no name of a run")
        if texts[STATUS] not in STATUSES:
            raise DamagedFileError(f"status {texts[STATUS]!r} is none of {', '.join(STATUSES)}")
        # fp32 is all that versions 1 to 3 had.
        texts[OPTIMIZER_STATE] = texts[OPTIMIZER_STATE] or "fp32"
        return texts, numbers


def _cells(line: bytes) -> list[str]:
    """Return the cells of a line, none if it is no line of a CSV."""
    try:
        if b'"' not in line:
            return line.decode().rstrip("\r\n").split(",")
        return next(csv.reader([line.decode().rstrip("\r\n")]), []) if b"\0" not in line else []
    except (ValueError, csv.Error):
        return []
