"""What a process of a run does before anything else: its lines stay whole, and a signal harms nothing."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import platform
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


def begin_process() -> None:
    """To be called first, by the process's main thread."""
    whole_lines()
    signals_on_their_own_stack()


def whole_lines() -> None:
    """Hand each line of stdout and stderr to the system in one write, when it is complete.

    Ranks share one pipe or terminal. With `PYTHONUNBUFFERED=1`, usual in containers, `print` writes every argument and
    the line's end by itself, and lines of ranks that print at the same time come out mixed; without it, lines wait in a
    buffer where a killed process loses them. A write of up to PIPE_BUF (4096) bytes is never mixed with another (POSIX).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook and a test put others in its place
            stream.reconfigure(line_buffering=True, write_through=False)


def signals_on_their_own_stack() -> None:
    """Give signal handlers a stack of their own; a crash in a library then says, too, where in Python it was.

    oneDNN before 3.11.2 (torch 2.11 has 3.10.2) keeps buffers of fp32 products on the heap and points the stack register there:
    a handler that runs meanwhile, as for SIGTERM or Ctrl-C, overwrites what lies before them, and the process aborts in a later
    malloc instead of saving (github.com/uxlfoundation/oneDNN/issues/4845). Python's handlers use an alternate stack if there
    is one (since 3.10), and faulthandler makes one for the thread that enables it; a process's signals go to its main thread.
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def share_cores() -> None:
    """Share the cores between this machine's processes, unless the user has said how many threads each may have.

    Said in the environment too, for libraries that would choose for themselves.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        import torch

        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep large blocks that torch frees, for the next step to use.

    By default each tensor of more than 32 MiB is mapped anew, and every page of it is faulted in and zeroed on first touch;
    on a CPU that was a tenth of a training step (docs/LOG.md). The resident set stays at its peak in exchange. Without
    glibc nothing is changed.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
