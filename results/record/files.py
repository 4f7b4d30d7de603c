"""Writing results so that nothing is lost or torn: whole rows, one lock, files private to the user."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gptscale.common.errors import StorageError, visible
from gptscale.common.process.mock import is_mock
from gptscale.results.columns import RunTable, csv_line

LOCK_WAIT_S = 60.0


def append_row(table: RunTable, out: Path, row: Mapping[str, Any]) -> Path:
    """Append one row to the table in `out`, which many runs share, and return the path of its file.

    It is one write under a lock, and a torn last line is cut off first. A file of an earlier version is extended before it.
    Raises ValueError for a wrong row, and StorageError if the file has other columns, the lock stays taken or the disk
    is full or fails.
    """
    path, line = out / table.file, csv_line(table.cells(row))
    if is_mock():
        what = "CUDA is a mock, and its figures are none"
        raise StorageError(what, f"in {path}", "use gptscale simulate, which leaves no row")
    with locked(path):
        _extend(table, path)
        with opened(path) as descriptor:
            append(descriptor, line if os.fstat(descriptor).st_size else table.header + line, path)
            sync(descriptor, path)
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes off a file that many runs share, or raise StorageError, as for what its disk does not do."""
    with storage_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with FileLock(f"{path}.lock", timeout=LOCK_WAIT_S, mode=0o600, poll_interval=0.01):
                yield
        except Timeout:
            what, fix = f"{path} stayed locked for {LOCK_WAIT_S:.0f} s", "end the process that holds it"
            raise StorageError(what, "in --out", fix) from None


def _extend(table: RunTable, path: Path) -> None:
    """Cut off a torn last line, and bring a file of an earlier version under today's header in one move.

    Raises StorageError if the file is not this table's.
    """
    with opened(path) as descriptor:
        cut_torn_line(descriptor, path)
        with open(descriptor, "rb", closefd=False) as file:
            header = file.readline()
            if fault := table.fault(header):
                raise StorageError(f"{path} {fault}", "in --out", "point --out to another folder, or move the file")
            older = header + file.read() if header not in (b"", table.header) else b""
    if older:
        replace_file(path, table.extended(older))


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one move, so that readers see the old file or the new one."""
    replace_file(path, json.dumps(value, indent=1, default=str).encode())


def export(path: Path, data: bytes) -> None:
    """Write a file that the user may give away: in one move, and readable by whom umask allows.

    A pipe or a device takes the bytes itself. Raises StorageError if it cannot be written.
    """
    with storage_errors(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            replace_file(path.resolve(), data, 0o666)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace the content of a file in one move, so that after a crash it is all old or all new.

    mode: its rights, of which umask takes some away. Raises StorageError if the disk is full or fails.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storage_errors(path):
        with opened(temporary, os.O_WRONLY | os.O_TRUNC, mode) as descriptor:
            append(descriptor, data, path)
            sync(descriptor, path)
        os.replace(temporary, path)


def host_name() -> str:
    """Return this machine's name as text that every file takes, because a kernel takes any bytes as one."""
    return visible(socket.gethostname())


def warn(message: str) -> None:
    """Print one line to standard error about something that the user should know and that the run survives."""
    print(f"gptscale: warning: {message}", file=sys.stderr, flush=True)


def open_private(path: Path, flags: int = os.O_RDWR | os.O_APPEND, mode: int = 0o600) -> int:
    """Open or create a file that only the user may read, unless `mode` says more, and return its descriptor.

    Raises StorageError for a symbolic link and for what is no file, such as a pipe, which would block its reader.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = f"{path} is a symbolic link"
            raise StorageError(what, "in the results folder", "remove it or choose another --out") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise StorageError(f"{path} is no file", "in the results folder", "remove it or choose another --out")
    return descriptor


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_APPEND, mode: int = 0o600) -> Iterator[int]:
    """Open a file as `open_private` does, and close it at the end."""
    descriptor = open_private(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def append(descriptor: int, data: bytes | bytearray, path: Path) -> None:
    """Append all of `data`, or none of it and raise StorageError if the disk is full or fails."""
    size = os.fstat(descriptor).st_size
    reason = f"no space for {len(data):,} bytes"
    try:
        if os.write(descriptor, data) == len(data):
            return
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"{error.strerror}, {len(data):,} bytes were not written"
    # The bytes that did fit are a torn row.
    os.ftruncate(descriptor, size)
    raise StorageError(reason, f"in {path}", "free space or choose another place")


def sync(descriptor: int, path: Path) -> None:
    """Wait until the disk has the file, or raise StorageError if the disk does not take it."""
    with storage_errors(path):
        os.fsync(descriptor)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        raise StorageError(what, f"in {path}", "free space or choose another place") from None


def cut_torn_line(descriptor: int, path: Path) -> None:
    """Drop the row behind the last newline, whose writer died, with a warning."""
    size = os.fstat(descriptor).st_size
    end = size
    while end:
        begin = max(0, end - 2**16)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end != size:
        warn(f"the last line of {path} was torn ({size - end} bytes), in a run that died while writing, it is cut off")
        os.ftruncate(descriptor, end)
