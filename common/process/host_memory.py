"""Host memory that a training process gives back and asks for again at every step, kept instead."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


def keep_freed_memory() -> None:
    """Make glibc's malloc keep large blocks that torch frees, for the next step to use.

    By default each tensor of more than 32 MiB is mapped anew, and every page of it is faulted in and zeroed on first touch;
    on a CPU that was a tenth of a training step (docs/measurements/LOG.md). The resident set stays at its peak in exchange.
    Without glibc nothing is changed.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
