"""Writing results so that nothing is lost and nothing is torn: whole rows, one lock, files private to the user."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptscale.common.errors import ConfigError, StorageError
from gptscale.results.schema import STEP_COLUMNS, SUMMARY_COLUMNS, cell, summary_cells

LOCK_WAIT_S = 60.0


def csv_line(cells: Iterable[str]) -> bytes:
    """One CSV line with its newline."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    if written != len(data):  # a disk filling up: take the torn part back, so that the file still ends in a whole row
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise StorageError("disk full while writing a row", "in the results folder", "free space and run again")


def append_summary(out: Path, row: Mapping[str, Any]) -> Path:
    """Append one row to `out`/summary.csv, under a lock and by one write; a torn last line is cut off first.

    Raises StorageError if the file is of another schema or the lock stays taken.
    """
    path, line = out / "summary.csv", csv_line(summary_cells(row))
    out.mkdir(parents=True, exist_ok=True)
    header = csv_line(SUMMARY_COLUMNS)
    try:
        with FileLock(f"{path}.lock", timeout=LOCK_WAIT_S, mode=0o600):
            descriptor = _open(path, os.O_RDWR | os.O_APPEND)
            try:
                _cut_torn_line(descriptor)
                if os.fstat(descriptor).st_size == 0:
                    line = header + line
                elif os.pread(descriptor, len(header), 0) != header:
                    raise StorageError(f"{path} has other columns", "in --out", "point --out to another folder, or move the file")
                _write_all(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except Timeout:
        raise StorageError(f"{path} stayed locked for {LOCK_WAIT_S:.0f} s", "in --out", "end the process that holds it") from None
    return path


def _cut_torn_line(descriptor: int) -> None:
    """Drop what follows the last newline: a row whose writer died."""
    size = os.fstat(descriptor).st_size
    kept, piece = size, 2**16
    while kept:
        begin = max(0, kept - piece)
        newline = os.pread(descriptor, kept - begin, begin).rfind(b"\n")
        if newline >= 0:
            kept = begin + newline + 1
            break
        kept = begin
    if kept != size:
        os.ftruncate(descriptor, kept)


class StepLog:
    """A CSV that one process appends to; rows are buffered, and on disk after `sync`.

    after_step: when a run resumes from step N, rows beyond N (written before it died) move to *.discarded.csv, so that
    the file has each step once.
    """

    def __init__(self, path: Path, columns: Sequence[str] = STEP_COLUMNS, *, after_step: int = 0) -> None:
        self.columns = columns
        self._descriptor = _open(path, os.O_RDWR | os.O_APPEND)
        _cut_torn_line(self._descriptor)
        self._pending = b""
        if os.fstat(self._descriptor).st_size == 0:
            self._pending = csv_line(columns)
        else:
            self._discard(path, after_step)

    def _discard(self, path: Path, after_step: int) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines[1:] if int(line.split(b",", 1)[0]) <= after_step]
        if gone := [line for line in lines[1:] if int(line.split(b",", 1)[0]) > after_step]:
            discarded = _open(path.with_name(f"{path.stem}.discarded.csv"), os.O_WRONLY | os.O_APPEND)
            _write_all(discarded, b"".join(gone))
            os.close(discarded)
            os.ftruncate(self._descriptor, 0)
            _write_all(self._descriptor, b"".join([lines[0], *kept]))
            os.fsync(self._descriptor)

    def append(self, row: Mapping[str, Any]) -> None:
        """Buffer one row."""
        self._pending += csv_line(cell(row[column]) for column in self.columns)

    def flush(self) -> None:
        """Hand the rows to the operating system: they survive this process."""
        if self._pending:
            _write_all(self._descriptor, self._pending)
            self._pending = b""

    def sync(self) -> None:
        """Put the rows on disk: they survive the machine."""
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Put the rows on disk and close."""
        self.sync()
        os.close(self._descriptor)


@contextmanager
def run_directory(out: Path, run_id: str) -> Iterator[Path]:
    """Make and hold `out`/runs/<run_id>: ConfigError if another process holds it. A dead holder's lock is gone with it."""
    folder = out / "runs" / run_id
    out.mkdir(parents=True, exist_ok=True)
    (out / "runs").mkdir(exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = _open(folder / ".lock", os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise ConfigError(f"run {run_id} is in use by {holder}", f"in {out}", "wait for it or choose another --run-name") from None
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.pwrite(descriptor, f"pid {os.getpid()} host {socket.gethostname()} since {since}\n".encode(), 0)
        yield folder
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one move: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = _open(temporary, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file, indent=1, default=str)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
