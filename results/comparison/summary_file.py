"""Read the lines of a summary.csv. A damaged or foreign line becomes a row that says so, and all others are read."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import ConfigError, visible
from gptscale.common.settings.checks import RUN_NAME
from gptscale.results.columns import STATUSES, SUMMARY, cells_of
from gptscale.results.comparison.rows import DAMAGED, LOSSES, NUMBERS, SHARED_TEXTS, TEXT
from gptscale.results.comparison.run_files import NUMBER_MAX, DamagedFileError, clip

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

# From how many lines on pandas' parser is the faster one.
MANY_LINES = 100
DAMAGED_ROWS_MAX = 20


class Summary:
    """A summary.csv that is read block by block.

    Nearly all lines are plain, and pandas parses many of them in the time that one takes by itself. It accepts too much, so
    each other line, and each that looks wrong, is parsed by itself.
    """

    def __init__(self, file: Path, header: Sequence[str]) -> None:
        """Find the columns, or raise ConfigError for a file that is no summary."""
        if missing := SUMMARY.missing(header):
            what = f"{visible(str(file))} is no summary (it has no column {missing[0]})"
            raise ConfigError(what, "in compare", "give a file that gptscale wrote")
        self.name, self.folder, self.n = file.name, str(file.parent.resolve()), len(header)
        # Without those that the version of the file lacks.
        self.at = {column: header.index(column) for column in SUMMARY.names if column in header}
        self.n_damaged = 0

    def run_id(self, cells: Sequence[str]) -> str:
        """Return the name of the run in a line, empty if the line is too short."""
        return cells[self.at["run_id"]] if len(cells) > self.at["run_id"] else ""

    def columns_of(self, block: Sequence[tuple[int, bytes]]) -> dict[str, Any]:
        """Return the rows in lines, each with its number. A damaged line is a row that says so, or is only counted.

        Columns with few different texts are categoricals, which take less memory.
        """
        import numpy as np

        plain = [i for i, (_, line) in enumerate(block) if self._is_plain(line)]
        table = self._parse([block[i][1] for i in plain]) if len(plain) > MANY_LINES else None
        at = np.array([], dtype=int)
        columns: dict[str, Any] = {}
        if table is not None:
            right = _right(table)
            at, columns = np.array(plain)[right], {str(name): table[name].to_numpy()[right] for name in table}
        is_parsed = np.zeros(len(block), dtype=bool)
        is_parsed[at] = True
        others = {i: row for i in np.flatnonzero(~is_parsed).tolist() if (row := self._parse_one(*block[i]))}
        return self._joined(at, columns, others)

    def columns_of_rest(self) -> dict[str, Any]:
        """Return a row that counts the damaged lines which are no rows themselves, if there are such lines."""
        import numpy as np

        others = max(0, self.n_damaged - DAMAGED_ROWS_MAX)
        row = _damaged_row(f"{others} more lines", f"{self.name} has {self.n_damaged} lines that are no rows")
        return self._joined(np.array([], dtype=int), {}, {0: row} if others else {})

    def _joined(
        self, at: NDArray[Any], columns: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return rows that were parsed at once, and those parsed one by one, in the order of their lines.

        at: the lines of the former. Columns and cells that are missing are empty.
        """
        import numpy as np

        order = np.argsort(np.concatenate([at, np.array(list(others), dtype=int)]))
        result: dict[str, Any] = {"folder": _as_texts(np.full(len(order), self.folder, dtype=object))}
        for name in TEXT + NUMBERS:
            kind, empty = (object, "") if name in TEXT else (float, math.nan)
            parsed = columns[name] if name in columns else np.full(len(at), empty, dtype=kind)
            cells = [row.get(name, empty) for row in others.values()]
            joined = (
                _as_texts(parsed, cells)
                if name in SHARED_TEXTS
                else np.concatenate([parsed, np.array(cells, dtype=kind)])
            )
            result[name] = joined[order]
        return result

    def _is_plain(self, line: bytes) -> bool:
        return (
            line.count(b",") == self.n - 1 and not (b'"' in line or b"\r" in line or b"\0" in line) and line[-1] == 10
        )

    def _parse(self, lines: Sequence[bytes]) -> pd.DataFrame | None:
        """Return the columns of plain lines as they are, None if a cell is no number or no text."""
        import pandas as pd

        try:
            table: pd.DataFrame = pd.read_csv(  # type: ignore[call-overload]  # names of columns may be numbers
                io.BytesIO(b"".join(lines)),
                header=None,
                usecols=list(self.at.values()),
                # As categories, words such as "false" and "2.10" would become booleans and numbers.
                dtype={at: float if column in NUMBERS else object for column, at in self.at.items()},
                keep_default_na=False,
                na_values={at: [""] for column, at in self.at.items() if column in NUMBERS},
                quoting=csv.QUOTE_NONE,
                low_memory=False,
                lineterminator="\n",
            )
        except ValueError:
            return None
        return table.rename(columns={at: column for column, at in self.at.items()})

    def _parse_one(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the row in a line. If it is damaged, it says so, or is empty after too many of its kind."""
        cells = cells_of(line)
        try:
            return self._parse_cells(cells)
        except DamagedFileError as error:
            self.n_damaged += 1
            if self.n_damaged > DAMAGED_ROWS_MAX:
                return {}
            run_id = self.run_id(cells)
            name = run_id if RUN_NAME.fullmatch(run_id) else f"line {number}"
            return _damaged_row(name, f"line {number} of {self.name}: {error}")

    def _parse_cells(self, cells: Sequence[str]) -> dict[str, Any]:
        """Return the row in the cells of a line, or raise DamagedFileError if it is none."""
        if len(cells) != self.n:
            raise DamagedFileError(f"{len(cells)} cells in place of {self.n}")
        row: dict[str, Any] = {column: cells[at] for column, at in self.at.items()}
        for column in NUMBERS:
            try:
                row[column] = number = float(row.get(column) or "nan")
            except ValueError as error:
                raise DamagedFileError(clip(visible(str(error)), 100)) from None
            if (number < 0 or number > NUMBER_MAX) and column not in LOSSES:
                raise DamagedFileError(f"{column} {number} is out of range")
        if not RUN_NAME.fullmatch(row["run_id"]):
            raise DamagedFileError(f"run_id {clip(visible(row['run_id']))!r} is no name of a run")
        if row["status"] not in STATUSES:
            raise DamagedFileError(f"status {clip(visible(row['status']))!r} is none of {', '.join(STATUSES)}")
        return row


def _right(table: pd.DataFrame) -> NDArray[Any]:
    """Return which rows of a table are beyond doubt, by the same rules as those for one line."""
    import numpy as np

    is_name = RUN_NAME.fullmatch
    right = np.array([is_name(run_id) is not None for run_id in table.run_id.tolist()])
    right &= table.status.isin(STATUSES).to_numpy()
    for column in table.columns.intersection(list(NUMBERS)).difference(list(LOSSES)):
        numbers = table[column].to_numpy()
        right &= ~((numbers < 0) | (numbers > NUMBER_MAX))
    return right


def _as_texts(texts: NDArray[Any], more: Sequence[str] = ()) -> pd.Categorical:
    """Return texts, and `more` of them behind, as a categorical."""
    import numpy as np
    import pandas as pd

    codes, different = pd.factorize(texts)
    number = {text: i for i, text in enumerate(different)}
    codes = np.concatenate([codes, np.array([number.setdefault(text, len(number)) for text in more], dtype=int)])
    return pd.Categorical.from_codes(codes, pd.Index(list(number), dtype=object))


def _damaged_row(run_id: str, damage: str) -> dict[str, str]:
    return {"run_id": run_id, "status": DAMAGED, "error": damage}
