"""A CSV of one run to which one process appends a row per step, and which a resumed run continues."""

from __future__ import annotations

import csv
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from gptscale.common.errors import StorageError
from gptscale.results.columns import STEP_COLUMNS, cell, csv_line
from gptscale.results.record.files import append, cut_torn_line, open_private, opened, replace_file, sync, warn

STEP = re.compile(rb"(\d{1,18}),")
# No row of ours is as long. A damaged file may be one line of any length.
LINE_BYTES_MAX = 2**16


class StepLog:
    """A CSV that one process appends to, whose rows are buffered until `flush` and safe on disk after `sync`.

    after_step: when a run resumes from step N, rows beyond N, which were written before it died, move to *.discarded.csv.
    Thus the file has each step once. Lines that are no whole row, as a power cut leaves them, move there too, with a warning.
    While the disk is full, rows are held in memory with a warning, and written as soon as there is space. If there never was,
    `close` prints them and raises StorageError.
    """

    def __init__(self, path: Path, columns: Sequence[str] = STEP_COLUMNS, *, after_step: int = 0) -> None:
        self.path, self.columns = path, columns
        if path.exists():
            self._discard(after_step)
        self._descriptor = open_private(path)
        self._pending = bytearray(b"" if os.fstat(self._descriptor).st_size else csv_line(columns))
        self._held = False

    def _discard(self, after_step: int) -> None:
        """Move rows beyond `after_step` and damaged lines to the other file, where they are safe before they leave this one."""
        with opened(self.path) as descriptor:
            cut_torn_line(descriptor, self.path)
            with open(descriptor, "rb", closefd=False) as file:
                lines = file.read().splitlines(keepends=True)
        header = csv_line(self.columns)
        first = lines[0] if lines else header
        if first != header and (ours := [_as_ours(line) for line in lines])[0] == header:
            first, lines = header, ours
            replace_file(self.path, b"".join(lines))
            warn(f"{self.path} was saved by a spreadsheet, and is written again as it was")
        if first != header and b"\0" not in first and first.strip():
            raise StorageError(f"{self.path} has other columns", "in the run's folder", "choose another --run-name")
        rows = [(line, _step_of(line, len(self.columns))) for line in lines[1:]]
        damaged = [number for number, (_, step) in enumerate(rows, start=2) if step is None]
        good_lines = [line for line, step in rows if step is not None and step <= after_step]
        beyond = [line for line, step in rows if step is None or step > after_step]
        if first != header:
            damaged, beyond = [1, *damaged], [first, *beyond]
        if not beyond:
            return
        discarded = self.path.with_name(f"{self.path.stem}.discarded.csv")
        with opened(discarded) as descriptor:
            append(descriptor, b"".join(beyond), discarded)
            sync(descriptor, discarded)
        replace_file(self.path, header + b"".join(good_lines))
        if damaged:
            which = (
                f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is line {damaged[0]},"
            )
            warn(f"{which} of {self.path} held no whole row, moved to {discarded.name}")

    @property
    def holds_rows(self) -> bool:
        """Whether there are rows that no file has."""
        return bool(self._pending)

    def append(self, row: Mapping[str, Any]) -> None:
        self._pending += csv_line(cell(row[column]) for column in self.columns)

    def flush(self) -> None:
        """Give the rows to the operating system, where they survive this process.

        Raises StorageError if the file is gone.
        """
        try:
            self._write()
        except StorageError as error:
            if not self._held:
                warn(f"{error}, rows are held in memory until then")
            self._held = True
        self._check_it_is_there()

    def sync(self) -> None:
        """Put the rows on disk, where they survive the machine."""
        self.flush()
        sync(self._descriptor, self.path)

    def close(self) -> None:
        try:
            self._write()
            sync(self._descriptor, self.path)
            self._check_it_is_there()
        except StorageError:
            if self._pending:
                sys.stderr.write(f"gptscale: rows that {self.path} lacks:\n{self._pending.decode()}")
            raise
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        append(self._descriptor, self._pending, self.path)
        if self._held:
            rows = self._pending.count(b"\n")
            warn(f"there is space again, {self.path} has the {rows} rows that were held in memory")
        self._held = False
        self._pending.clear()

    def _check_it_is_there(self) -> None:
        """Raise StorageError if the file was removed or replaced, since rows then go where nobody can read them."""
        try:
            is_there = os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            is_there = False
        if not is_there:
            what = f"{self.path} was removed or replaced during the run, and its rows are lost"
            raise StorageError(what, "in --out", "start the run again and leave its folder alone")


def close_logs(logs: Iterable[StepLog | None], *, failed: bool) -> None:
    """Close all logs of a run, the others too if one raises StorageError.

    failed: whether another error ended the run. The StorageError is then a warning, so that it does not hide that error.
    """
    try:
        with ExitStack() as stack:
            for log in logs:
                if log:
                    stack.callback(log.close)
    except StorageError as error:
        if not failed:
            raise
        warn(str(error))


def totals(steps: Path) -> tuple[float | None, float | None, float]:
    """Return the loss of step 1 and that of the last step of a steps.csv or eval.csv, None if it has none, and the seconds."""
    first, last, seconds = None, None, 0.0
    with steps.open(newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            with suppress(ValueError, TypeError, KeyError):
                step_time_s = float(row.get("step_time_s", 0.0))
                seconds += step_time_s if math.isfinite(step_time_s) else 0.0
                last = float(row["loss"])
                first = last if row["step"] == "1" else first
    return first, last, seconds


def _as_ours(line: bytes) -> bytes:
    """Return a line without what spreadsheets add: a mark of UTF-8, quotes, semicolons and Windows' end of a line."""
    line = line.removeprefix(b"\xef\xbb\xbf").replace(b'"', b"").replace(b";", b",")
    return line.rstrip(b"\r\n") + b"\n" if line.endswith(b"\n") else line


def _step_of(line: bytes, n_columns: int) -> int | None:
    """Return the step of a row, which is its first cell, or None if the line is no whole row."""
    step = STEP.match(line)
    if step is None or len(line) > LINE_BYTES_MAX or b"\0" in line or not line.endswith(b"\n"):
        return None
    try:
        (cells,) = csv.reader([line.decode()])
    except (ValueError, csv.Error):
        return None
    return int(step[1]) if len(cells) == n_columns else None
