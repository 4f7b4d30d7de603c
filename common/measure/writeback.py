"""The processor time of the kernel's own threads, of which a share is for what this process wrote to disk.

On a virtual disk they took 10 seconds of a processor for a GiB. A run that saves would look as if other programs had taken that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

# All threads of the kernel are children of this process.
KTHREADD = "2"


class Writeback(NamedTuple):
    """Counters of one moment: the kernel's seconds, the bytes that this process and its children wrote, and those of all."""

    kernel_s: float
    own_bytes: int
    all_bytes: int

    def since(self, before: Writeback) -> float:
        """Return the seconds that the kernel's threads worked since then, times the share of this process in what was written."""
        written, own = self.all_bytes - before.all_bytes, self.own_bytes - before.own_bytes
        return (self.kernel_s - before.kernel_s) * min(1.0, own / written) if written > 0 and own > 0 else 0.0


def writeback(proc: Path = Path("/proc")) -> Writeback:
    """Return the counters of now, zeros where the system keeps none, as in a container that hides the kernel's threads."""
    return Writeback(_kernel_s(proc), _own_bytes(), _all_bytes(proc))


def _kernel_s(proc: Path) -> float:
    ticks = 0
    for file in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The name may hold blanks and brackets.
            cells = file.read_text().rpartition(")")[2].split()
            if cells[1] == KTHREADD:
                ticks += int(cells[11]) + int(cells[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_bytes() -> int:
    total, this = 0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error, OSError, AttributeError):
            total += process.io_counters().write_bytes
    return total


def _all_bytes(proc: Path) -> int:
    with suppress(OSError, ValueError):
        for line in (proc / "vmstat").read_text().splitlines():
            if line.startswith("pgpgout "):
                return 1024 * int(line.split()[1])
    return 0
