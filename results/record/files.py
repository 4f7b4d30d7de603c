"""Writing results so that nothing is lost or torn: whole rows, one lock, files private to the user."""

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
# No space on the disk, in the quota, in the file size limit.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def csv_line(cells: Iterable[str]) -> bytes:
    """Return the cells as one CSV line with its newline."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def append_summary(out: Path, row: Mapping[str, Any]) -> Path:
    """Append one row to `out`/summary.csv and return the file's path.

    It is one write under a lock, and a torn last line is cut off first. Raises StorageError if the file has another schema,
    the lock stays taken or the disk is full.
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
            _append(descriptor, line, path)
            os.fsync(descriptor)
    except Timeout:
        raise StorageError(
            f"{path} stayed locked for {LOCK_WAIT_S:.0f} s", "in --out", "end the process that holds it"
        ) from None
    return path


class StepLog:
    """A CSV that one process appends to, whose rows are buffered until `flush` and safe on disk after `sync`.

    after_step: when a run resumes from step N, rows beyond N, which were written before it died, move to *.discarded.csv.
    Thus the file has each step once.
    While the disk is full, rows are held in memory with a warning, and written as soon as there is space. `close` raises
    StorageError if there never was.
    """

    def __init__(self, path: Path, columns: Sequence[str] = STEP_COLUMNS, *, after_step: int = 0) -> None:
        self.path, self.columns = path, columns
        if path.exists():
            self._discard(after_step)
        self._descriptor = _open(path)
        self._pending = b"" if os.fstat(self._descriptor).st_size else csv_line(columns)

    def _discard(self, after_step: int) -> None:
        """Move rows beyond `after_step` to the other file, where they are safe before they leave this one."""
        with _opened(self.path) as descriptor:
            _cut_torn_line(descriptor, self.path)
        header, *rows = self.path.read_bytes().splitlines(keepends=True) or [csv_line(self.columns)]
        if header != csv_line(self.columns):
            raise StorageError(f"{self.path} has other columns", "in the run's folder", "choose another --run-name")
        kept = [row for row in rows if _step_of(row) <= after_step]
        beyond = [row for row in rows if _step_of(row) > after_step]
        if not beyond:
            return
        discarded = self.path.with_name(f"{self.path.stem}.discarded.csv")
        with _opened(discarded) as descriptor:
            _append(descriptor, b"".join(beyond), discarded)
            os.fsync(descriptor)
        replace_file(self.path, header + b"".join(kept))

    def append(self, row: Mapping[str, Any]) -> None:
        """Buffer one row."""
        self._pending += csv_line(cell(row[column]) for column in self.columns)

    def flush(self) -> None:
        """Give the rows to the operating system, where they survive this process."""
        if not self._pending:
            return
        try:
            _append(self._descriptor, self._pending, self.path)
        except StorageError as error:
            warn(f"{error}, {len(self._pending.splitlines())} rows are held in memory")
        else:
            self._pending = b""

    def sync(self) -> None:
        """Put the rows on disk, where they survive the machine."""
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Put the rows on disk and close."""
        try:
            _append(self._descriptor, self._pending, self.path)
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@contextmanager
def run_directory(out: Path, run_id: str) -> Iterator[Path]:
    """Make the folder `out`/runs/<run_id>, and lock it for this process.

    Raises ConfigError if another process has locked it. The lock of a process that died is gone with it. Raises StorageError
    if `runs` or the folder is a symbolic link, because what is private to a run must not land elsewhere.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = out / "runs" / run_id
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        if each.is_symlink():
            raise StorageError(f"{each} is a symbolic link", "in --out", "remove it or choose another folder")
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


def _step_of(row: bytes) -> int:
    return int(row.split(b",", 1)[0])


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one move, so that readers see the old file or the new one."""
    replace_file(path, json.dumps(value, indent=1, default=str).encode())


def warn(message: str) -> None:
    """Print one line to standard error about something that the user should know and that the run survives."""
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


def _append(descriptor: int, data: bytes, path: Path) -> None:
    """Append all of `data`, or none of it and raise StorageError if the disk is full."""
    size = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
    except OSError as error:
        if error.errno not in FULL:
            raise
        written = 0
    if written != len(data):
        # The bytes that did fit are a torn row.
        os.ftruncate(descriptor, size)
        raise StorageError(f"no space for {len(data)} bytes", f"in {path}", "free space or point --out elsewhere")


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file in one move, so that after a crash it is all old or all new.

    Raises StorageError if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with _opened(temporary, os.O_WRONLY | os.O_TRUNC) as descriptor:
        _append(descriptor, data, path)
        os.fsync(descriptor)
    os.replace(temporary, path)


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Drop the row behind the last newline, whose writer died, with a warning."""
    size = os.fstat(descriptor).st_size
    kept = size
    while kept:
        begin = max(0, kept - 2**16)
        newline = os.pread(descriptor, kept - begin, begin).rfind(b"\n")
        if newline >= 0:
            kept = begin + newline + 1
            break
        kept = begin
    if kept != size:
        warn(f"the last line of {path} was torn ({size - kept} bytes), in a run that died while writing, it is cut off")
        os.ftruncate(descriptor, kept)
