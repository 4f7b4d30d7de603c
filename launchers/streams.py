"""What a process of a run prints: lines that stay whole, and are seen at once."""

from __future__ import annotations

import io
import sys


def whole_lines() -> None:
    """Hand each line of stdout and stderr to the system in one write, when it is complete.

    Ranks share one pipe or terminal. With `PYTHONUNBUFFERED=1`, usual in containers, `print` writes every argument and
    the line's end by itself, and lines of ranks that print at the same time come out mixed; without it, lines wait in a
    buffer where a killed process loses them. A write of up to PIPE_BUF (4096) bytes is never mixed with another (POSIX).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook and a test put others in its place
            stream.reconfigure(line_buffering=True, write_through=False)
