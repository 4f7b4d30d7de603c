"""What a process under the mock of CUDA can ask it: the list of calls, and bytes of the device and of host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Call(NamedTuple):
    """Something that the device was asked to do.

    time_s: when the host asked, on its monotonic clock.
    kind: kernel, product, copy, set, collective, graph, record, wait, or mark, which the program itself wrote.
    stream: its number, of which 0 is the default stream.
    sizes: of a product m, n, k and how many; of a collective its bytes, the ranks and this rank; of a kernel its blocks, the
    threads of each and the bytes of shared memory; of a copy its bytes.
    """

    time_s: float
    kind: str
    stream: int
    name: str
    sizes: tuple[int, int, int, int]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for name in ("mock_peak_bytes", "mock_pinned_bytes", "mock_pinned_peak_bytes", "mock_host_peak_bytes"):
        getattr(library, name).restype = ctypes.c_size_t
    library.mock_list.argtypes = library.mock_mark.argtypes = [ctypes.c_char_p]
    return library


def pinned_peak_bytes() -> int:
    """Return the most bytes of host memory that were pinned at once."""
    return int(_library().mock_pinned_peak_bytes())


def share_host_memory() -> None:
    """Let large memory of the host share a few pages from now on, and count it. Its values are lost."""
    if _library().mock_share_host_memory():
        raise OSError("no address space for the host memory of a simulated rank")


def host_peak_bytes() -> int:
    """Return the most bytes of such memory at once. What was pinned when it was allocated is not in it."""
    return int(_library().mock_host_peak_bytes())


def device_peak_bytes(device: int) -> int:
    """Return the most bytes that were taken from a device at once, by whatever allocator."""
    return int(_library().mock_peak_bytes(device))


def communicators() -> int:
    """Return how many groups of two or more ranks have a communicator of NCCL."""
    return int(_library().mock_communicators())


def mark(name: str) -> None:
    """Write a mark into the list of calls."""
    _library().mock_mark(name.encode())


@contextmanager
def listing(path: Path) -> Iterator[None]:
    """List every call in a file while the body runs."""
    _library().mock_list(str(path).encode())
    try:
        yield
    finally:
        _library().mock_list(None)


def read_calls(path: Path) -> list[Call]:
    """Read the calls that `listing` wrote."""
    calls = []
    with path.open() as lines:
        for line in lines:
            time_s, kind, stream, name, *sizes = line.rstrip("\n").split("\t")
            a, b, c, d = (int(size) for size in sizes)
            calls.append(Call(float(time_s), kind, int(stream, 16), name, (a, b, c, d)))
    return calls
