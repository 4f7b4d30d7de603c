"""What a process of a run does before anything else.

It keeps its output in whole lines, its signal handlers on a stack of their own, its share of the cores, and freed memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from gptscale.common.process.environments import name_user

# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def begin_process() -> None:
    """Make output and signals safe, and name the user. The main thread of a process calls this first."""
    whole_lines()
    signals_on_their_own_stack()
    hang_up_ends()
    name_user()


def hang_up_ends() -> None:
    """Take SIGHUP, which a lost terminal or ssh session sends, as SIGTERM. Under nohup it stays ignored."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))


class Output(io.FileIO):
    """Standard output or error whose writes never fail: printing is not worth a run.

    What a full disk, or a reader that is gone, does not take is left out and counted.
    """

    lost_bytes = 0

    def write(self, data: Any) -> int:
        """Write as much as the system takes, and return the size of all of it."""
        size = memoryview(data).nbytes
        try:
            taken = super().write(data)
        except OSError:
            taken = 0
        Output.lost_bytes += size - (taken or 0)
        return size


def whole_lines() -> None:
    """Hand each line of stdout and stderr to the system in one write, when it is complete, and never fail because of it.

    Ranks share one pipe or terminal. With `PYTHONUNBUFFERED=1`, usual in containers, `print` writes every argument and the
    end of the line by itself, and lines of ranks that print at the same time are mixed. Without it, lines wait in a buffer,
    where a killed process loses them. A write of up to PIPE_BUF (4096) bytes is never mixed with another (POSIX).
    """
    no_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A notebook and a test put others in its place.
        if stream is getattr(sys, f"__{name}__"):
            stream.flush()
            output = io.BufferedWriter(Output(stream.fileno(), "w", closefd=False))
            stream = io.TextIOWrapper(output, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, stream)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def no_closed_streams() -> None:
    """Open what was closed of stdin, stdout and stderr (`>&-`) to nothing, so that no socket or file gets its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            os.set_inheritable(number, True)
            stream = os.fdopen(number, "w" if number else "r", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def signals_on_their_own_stack() -> None:
    """Give signal handlers a stack of their own.

    oneDNN before 3.11.2 (torch 2.11 has 3.10.2) points the stack register at the heap during fp32 products. A handler that runs
    meanwhile overwrites what lies there, and the process aborts later instead of saving
    (github.com/uxlfoundation/oneDNN/issues/4845). Python's handlers use an alternate stack if there is one, and faulthandler
    makes one for the thread that enables it. It also prints where in Python a process was when a library crashed.

    Until the run asks for more (ending.StopRequest), Ctrl-C ends the process as SIGTERM does, without a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def right_threads() -> int:
    """Return how many threads each process of this machine should have: its share of the processors."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def share_cores() -> None:
    """Share the cores between the processes of this machine, unless OMP_NUM_THREADS is set.

    Sets OMP_NUM_THREADS too, for libraries that would choose for themselves. The main thread calls it before any backward pass.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        threads = right_threads()
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        threads = torch.get_num_threads()
    # Also if the number stays: in a forked process the first call replaces the pool of threads. Threads of autograd would
    # race for it, and the process would abort ("Invalid thread pool!").
    torch.set_num_threads(threads)


def wait_for_free_cores() -> None:
    """Let this thread wait for a free core when it is woken, instead of taking one from a thread that runs.

    Threads that it starts from now on do the same. Ranks that share cores wake each other with every message. A woken rank that
    takes its sender's core at once may find the lock of their connection still held, and gloo's thread spins on that lock.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        # Some containers forbid it.
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_freed_memory() -> None:
    """Make glibc's malloc keep large blocks that torch frees, for the next step to use.

    By default malloc maps each tensor of more than 32 MiB anew, and the kernel zeroes every page of it on first touch. On a CPU
    that was a tenth of a training step (docs/measurements/LOG.md). In exchange the resident set stays at its peak.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
