"""What the C++ operators are compiled from, and a name for what comes out; setup.py runs this before an install."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "csrc"
# -fno-math-errno and -fno-trapping-math let branches become selects, and so loops vectors; NaN, Inf and -0.0 keep their
# meaning, as they would not under -ffast-math. Without -fopenmp at::parallel_for is a loop on one thread.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fopenmp",
]


def sources() -> list[Path]:
    """The files that a compiler is called with."""
    return sorted(FOLDER.glob("*.cpp"))


@cache
def fingerprint(torch_version: str) -> str:
    """Of the sources, the flags and the torch they are compiled against: a build is used only if it is of these."""
    digest = hashlib.sha256(f"{torch_version} {FLAGS}".encode())
    for path in sorted(FOLDER.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
