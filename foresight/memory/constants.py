"""What a GPU holds beside torch's allocator, which no simulation can know: constants, each with its source.

They are shown apart, and added to what the allocator reserves when it is asked whether a run fits.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class Constant(NamedTuple):
    """Bytes on one device. source: who measured them, on what."""

    name: str
    nbytes: int
    source: str


_ROWS = csv.DictReader(Path(__file__).with_name("constants.csv").read_text().splitlines())
CONTEXT, NCCL, NCCL_MORE = (Constant(row["name"], int(row["mib"]) * 2**20, row["source"]) for row in _ROWS)


def outside_of_torch(communicators: int) -> list[Constant]:
    """Return what lies on the device beside what torch reserves.

    communicators: the groups of ranks that talk through NCCL, 0 in a world of one.
    """
    more = NCCL_MORE._replace(nbytes=(communicators - 1) * NCCL_MORE.nbytes)
    return [CONTEXT, NCCL, more][: 1 + min(communicators, 2)]
