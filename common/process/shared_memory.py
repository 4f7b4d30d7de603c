"""Files in the launcher's memory, by which the ranks of one machine meet, and which no other user can open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Variables that name the launcher's files to its ranks: torch's store, and the heartbeats.
RENDEZVOUS, HEARTBEATS = "GPTSCALE_RENDEZVOUS", "GPTSCALE_HEARTBEATS"
# The bytes that a rank has for its heartbeat.
SLOT = 256


@contextmanager
def memory_file(name: str) -> Iterator[str]:
    """Hold a file in this process's memory, and yield a path by which processes of the same user, and root, open it."""
    descriptor = os.memfd_create(name)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


class Slots:
    """A file with a place of `SLOT` bytes for the heartbeat of each rank."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def set(self, rank: int, words: str) -> None:
        os.pwrite(self._file, words.encode().ljust(SLOT)[:SLOT], rank * SLOT)

    def get(self, rank: int) -> bytes:
        """Return the bytes of a rank, none if it has not written."""
        return os.pread(self._file, SLOT, rank * SLOT).strip(b" \0")
