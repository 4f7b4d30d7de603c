"""Writing results so that nothing is lost and nothing is torn: whole rows, one lock, files private to the user."""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptscale.common.errors import ConfigError, StorageError
from gptscale.results.record.columns import STEP_COLUMNS, SUMMARY_COLUMNS, cell, summary_cells

LOCK_WAIT_S = 60.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space on the disk, in the quota, in the file size limit


def csv_line(cells: Iterable[str]) -> bytes:
    """One CSV line with its newline."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def append_summary(out: Path, row: Mapping[str, Any]) -> Path:
    """Append one row to `out`/summary.csv, under a lock and by one write; a torn last line is cut off first.

    Raises StorageError if the file is of another schema, the lock stays taken or the disk is full.
    """
    path, line, header = out / "summary.csv", csv_line(summary_cells(row)), csv_line(SUMMARY_COLUMNS)
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with FileLock(f"{path}.lock", timeout=LOCK_WAIT_S, mode=0o600, poll_interval=0.01), _opened(path) as descriptor:
            _cut_torn_line(descriptor, path)
            if os.fstat(descriptor).st_size == 0:
                line = header + line
            elif os.pread(descriptor, len(header), 0) != header:
                raise StorageError(
                    f"{path} has other columns", "in --out", "point --out to another folder, or move the file"
                )
            _write_whole(descriptor, line, path)
            os.fsync(descriptor)
    except Timeout:
        raise StorageError(
            f"{path} stayed locked for {LOCK_WAIT_S:.0f} s", "in --out", "end the process that holds it"
        ) from None
    return path


class StepLog:
    """A CSV that one process appends to; rows are buffered, and on disk after `sync`.

    after_step: when a run resumes from step N, rows beyond N (written before it died) move to *.discarded.csv, so that
    the file has each step once.
    While the disk is full rows are held in memory, with a warning, and written as soon as it has space; `close` raises
    StorageError if it never had.
    """

    def __init__(self, path: Path, columns: Sequence[str] = STEP_COLUMNS, *, after_step: int = 0) -> None:
        self.path, self.columns = path, columns
        if path.exists():
            self._discard(after_step)
        self._descriptor = _open(path)
        self._pending = b"" if os.fstat(self._descriptor).st_size else csv_line(columns)

    def _discard(self, after_step: int) -> None:
        """Keep rows up to `after_step`; those beyond are safe in the other file before they leave this one."""
        with _opened(self.path) as descriptor:
            _cut_torn_line(descriptor, self.path)
        header, *rows = self.path.read_bytes().splitlines(keepends=True) or [csv_line(self.columns)]
        if header != csv_line(self.columns):
            raise StorageError(f"{self.path} has other columns", "in the run's folder", "choose another --run-name")
        beyond = [int(row.split(b",", 1)[0]) > after_step for row in rows]
        if not any(beyond):
            return
        discarded = self.path.with_name(f"{self.path.stem}.discarded.csv")
        with _opened(discarded) as descriptor:
            _write_whole(descriptor, b"".join(row for row, gone in zip(rows, beyond, strict=True) if gone), discarded)
            os.fsync(descriptor)
        replace_file(self.path, header + b"".join(row for row, gone in zip(rows, beyond, strict=True) if not gone))

    def append(self, row: Mapping[str, Any]) -> None:
        """Buffer one row."""
        self._pending += csv_line(cell(row[column]) for column in self.columns)

    def flush(self) -> None:
        """Hand the rows to the operating system: they survive this process."""
        if not self._pending:
            return
        try:
            _write_whole(self._descriptor, self._pending, self.path)
        except StorageError as error:
            warn(f"{error}, {len(self._pending.splitlines())} rows are held in memory")
        else:
            self._pending = b""

    def sync(self) -> None:
        """Put the rows on disk: they survive the machine."""
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Put the rows on disk and close."""
        try:
            _write_whole(self._descriptor, self._pending, self.path)
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@contextmanager
def run_directory(out: Path, run_id: str) -> Iterator[Path]:
    """Make and hold `out`/runs/<run_id>: ConfigError if another process holds it. A dead holder's lock is gone with it.

    Raises StorageError if `runs` or the folder is a symbolic link: what is private to a run must not land elsewhere.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = out / "runs" / run_id
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
        if made.is_symlink():
            raise StorageError(f"{made} is a symbolic link", "in --out", "remove it or choose another folder")
    with _opened(folder / ".lock") as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"run {run_id} is in use by {holder}", f"in {out}", "wait for it or choose another --run-name"
            ) from None
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        os.write(descriptor, f"pid {os.getpid()} on host {socket.gethostname()} since {since}\n".encode())
        yield folder


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one move: readers see the old file or the new one."""
    replace_file(path, json.dumps(value, indent=1, default=str).encode())


def warn(message: str) -> None:
    """One line on standard error, for what the user should know and the run survives."""
    print(f"gptscale: warning: {message}", file=sys.stderr, flush=True)


def _open(path: Path, flags: int = os.O_RDWR | os.O_APPEND) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(
                f"{path} is a symbolic link", "in the results folder", "remove it or choose another --out"
            ) from None
        raise


@contextmanager
def _opened(path: Path, flags: int = os.O_RDWR | os.O_APPEND) -> Iterator[int]:
    descriptor = _open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: bytes, path: Path) -> None:
    """Append all of `data` or none of it: StorageError if the disk is full."""
    size = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        written = 0
    if written != len(data):
        os.ftruncate(descriptor, size)  # what did fit is a torn row
        raise StorageError(f"no space for {len(data)} bytes", f"in {path}", "free space or point --out elsewhere")


def replace_file(path: Path, data: bytes) -> None:
    """The file holds `data`, or after a crash what it held before. StorageError if the disk is full."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _opened(temporary, os.O_WRONLY | os.O_TRUNC) as descriptor:
        _write_whole(descriptor, data, path)
        os.fsync(descriptor)
    os.replace(temporary, path)


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Drop what follows the last newline, a row whose writer died, and say so."""
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
        warn(f"the last line of {path} was torn ({size - kept} bytes), in a run that died while writing, it is cut off")
        os.ftruncate(descriptor, kept)
