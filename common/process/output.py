"""Standard output and standard error that may fail, as on a full disk, and end no run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

NAMES = {"stdout": "standard output", "stderr": "standard error"}
# What each stream did not take: how often, and why.
_lost: dict[str, tuple[int, str]] = {}


class _Forgiving(io.RawIOBase):
    """A file descriptor that takes what it is given, and notes what the system did not take."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._name = descriptor, name

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            _lost[self._name] = _lost.get(self._name, (0, ""))[0] + 1, str(error.strerror)
            return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def forgive_output() -> None:
    """Let this process print where nothing can be written: to a full disk, a reader that is gone, a closed descriptor.

    A stream that was closed goes nowhere, so that no file of the run takes its number and gets its lines.
    """
    for descriptor, name in enumerate(NAMES, 1):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _open_nowhere(descriptor))
        elif isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            with suppress(OSError):
                stream.flush()
            errors = stream.errors if stream.errors == "surrogateescape" else "backslashreplace"
            raw = io.BufferedWriter(_Forgiving(descriptor, name))
            line_buffering = stream.line_buffering
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, errors, line_buffering=line_buffering))


def _open_nowhere(descriptor: int) -> io.TextIOWrapper:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(nowhere, descriptor)
    return open(os.devnull, "w")


def lost_output() -> str:
    """Return which of this process's lines could not be written and why, empty if all were."""
    return "; ".join(f"{NAMES[name]} failed {count} times ({why})" for name, (count, why) in _lost.items())


def tell_lost_output() -> None:
    """Say on the other stream which lines could not be written."""
    if said := lost_output():
        working = sys.stderr if "stderr" not in _lost else sys.stdout
        working.write(f"gptscale: warning: {said}, the run went on without those lines\n")
