"""What a program asks of the device, as the mock lists it: kernels, products, collectives and copies."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Call(NamedTuple):
    """Something that the device was asked to do.

    time_s: when the host asked, on its monotonic clock.
    kind: kernel, product, copy, set, collective, graph, record, wait, sync; mark, which watch.py and boot.py write; or operation,
    which record.py writes.
    stream: its number, of which 0 is the default stream.
    sizes: of a product m, n, k and how many; of a collective its bytes, the ranks, this rank and the peer of a message; of a
    kernel its blocks, the threads of each and the bytes of shared memory; of a copy its bytes.
    """

    time_s: float
    kind: str
    stream: int
    name: str
    sizes: tuple[int, int, int, int]


def read_calls(path: Path) -> list[Call]:
    """Read the calls that a program under the mock has listed."""
    calls = []
    with path.open() as lines:
        for line in lines:
            time_s, kind, stream, name, *sizes = line.rstrip("\n").split("\t")
            a, b, c, d = (int(size) for size in sizes)
            calls.append(Call(float(time_s), kind, int(stream, 16), name, (a, b, c, d)))
    return calls
