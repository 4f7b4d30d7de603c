"""The sources and flags of the C++ operators, and a fingerprint of both.

setup.py runs this file before the package is installed, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "csrc"
# -fno-math-errno and -fno-trapping-math let the compiler turn branches into selects, and so loops into vectors. NaN, Inf
# and -0.0 keep their meaning, which they would lose under -ffast-math. Without -fopenmp, at::parallel_for is a loop on one
# thread. The standard of C++ is the one that torch asks for: 17 before 2.15, which asks for 20.
FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fvisibility=hidden", "-fopenmp"]


def sources() -> list[Path]:
    """Return the files that the compiler is called with."""
    return sorted(FOLDER.glob("*.cpp"))


@cache
def fingerprint(torch_version: str) -> str:
    """Return a hash of the sources, the flags and the torch version: a build with another one is not used."""
    digest = hashlib.sha256(f"{torch_version} {FLAGS}".encode())
    for path in sorted(FOLDER.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
