"""The errors that a user can cause or must act on.

Each says in one line what happened, where, and how to mend it.
"""

from __future__ import annotations


def visible(text: str) -> str:
    """Return text as one printable line: newlines, escape sequences and marks that turn the direction are written out."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """Return how an error begins, for the one line of another: its text, or its class if it has none as Python's MemoryError."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


class GptscaleError(Exception):
    """An error that ends a run with one line and an exit status instead of a traceback.

    what: the fault in a few words, with the offending value.
    where: the option, file or step at fault.
    fix: what the user can do, and it works if typed or done literally.
    """

    exit_status = 1

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        return visible(f"{self.what}, {self.where}, {self.fix}")


def cannot_start(why: str) -> GptscaleError:
    """Return the error for a process or thread that the system does not let this user start."""
    fix = "raise the limit that ulimit -u shows, or end other processes"
    return GptscaleError(f"no process or thread can be started ({why})", "on this machine", fix)


class ConfigError(GptscaleError):
    """A bad option or combination of options, or anything else that is found before a run starts."""

    exit_status = 2


class DataError(GptscaleError):
    """Training data that is missing, cut, of another format, or holds ids outside the vocabulary."""

    exit_status = 3


class CheckpointError(GptscaleError):
    """A checkpoint that is missing, damaged, or made by a run that this one cannot continue."""

    exit_status = 4


class StorageError(GptscaleError):
    """A folder that cannot be written, or is full."""

    exit_status = 5


class NumericError(GptscaleError):
    """A loss or gradient that is NaN or Inf: every rank stops before the optimizer applies it."""

    exit_status = 6


class PeerError(GptscaleError):
    """A rank that died or fell silent."""

    exit_status = 7


# SIGTERM arrived. If the run saves checkpoints, the same command with --resume continues it.
PREEMPTED_EXIT_STATUS = 75
# Ctrl-C, as shells count it: 128 and the number of SIGINT.
INTERRUPTED_EXIT_STATUS = 130
