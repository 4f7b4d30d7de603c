"""A small disk that can be filled and freed while runs write to it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

# From sched.h.
CLONE_NEWNS = 0x20000
BYTES = 48 * 2**20
PIECE = 4096


class SmallDisk:
    """A folder on a disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self) -> None:
        """Write until nothing more fits."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (2**20, PIECE):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)

    def free(self) -> None:
        """Remove what `fill` wrote."""
        self._filler.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove everything."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def own_mounts() -> bool:
    """Give this process mounts of its own, which end with it, and return whether it may mount.

    Called before any other process is started, because those that are to see the mounts must inherit them.
    """
    if os.geteuid() or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        return False
    return _mount("--make-rprivate", "/")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk | None]:
    """Mount a small disk in memory at `folder` while the body runs, or yield None if the system does not allow it."""
    folder.mkdir(parents=True)
    if not _mount("-t", "tmpfs", "-o", f"size={BYTES},mode=0700", "soak", str(folder)):
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: a process that was killed just now may still have a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=60)


def _mount(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True, check=False, timeout=60).returncode == 0
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
