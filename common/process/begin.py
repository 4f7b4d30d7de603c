"""What a process of a run does before anything else: its lines stay whole, and a signal harms nothing."""

from __future__ import annotations

import faulthandler
import io
import sys


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
