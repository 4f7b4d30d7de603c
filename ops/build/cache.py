"""The folder that keeps this user's compiled code, and how a build enters it: whole, and one build at a time."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout


class BuildError(Exception):
    """A build that cannot be done here.

    what: the fault in a few words.
    where: the step, folder or compiler it was found in.
    fix: what the user can do about it.
    """

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        # A compiler's own words may hold escape sequences. The message stays one line, and printable.
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in ", ".join(self.args))


class CacheFolderError(BuildError):
    """A folder of the cache that belongs to another user."""


def root() -> Path:
    """Return the folder that everything of the cache lies under."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptscale"


def private(folder: Path) -> Path:
    """Create `folder` under the root and keep it private to the user (0700).

    What lies in it is executed, so nobody else may write there. Raises CacheFolderError if it belongs to another user.
    """
    levels = [folder, *folder.parents]
    for level in reversed(levels[: levels.index(root()) + 1]):
        level.mkdir(mode=0o700, parents=True, exist_ok=True)
        if level.stat().st_uid != os.getuid():
            raise CacheFolderError(
                f"{level} belongs to another user", "in the operator cache", "set XDG_CACHE_HOME to your own"
            )
        level.chmod(0o700)
    return folder


def build_once(
    target: Path, build: Callable[[Path], Path], say: Callable[[str], object] = print, *, wait_s: float
) -> bool:
    """Build `target` unless it exists, and return whether this call built it.

    `build(work)` compiles in the empty folder `work` and returns the path that is then moved to `target`. Nothing that
    a killed build leaves behind can stop a later one, because the kernel frees the lock of a dead process. Raises
    BuildError if another process is still compiling after `wait_s` seconds.
    """
    if target.exists():
        return False
    folder = private(target.parent)
    lock = FileLock(folder / ".prepare.lock")
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise BuildError(
            "another `gptscale prepare` is compiling", f"under {folder}", "wait for it, or end that process"
        ) from None
    with lock:
        # These belong to builds that were killed: nobody else builds while this process holds the lock.
        for abandoned in folder.glob(".building-*"):
            say(f"removing what a killed compile left: {abandoned.name}")
            shutil.rmtree(abandoned)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
                os.rename(build(Path(work)), target)
    return True


def search_path() -> str:
    """Return PATH with the programs of this Python environment first, since ninja is one of them."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def tool_missing() -> tuple[str, str] | None:
    """Return which tool for compiling C++ is missing and the line that installs it, or None if all are there."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler", "apt-get install g++"
    if shutil.which("ninja", path=search_path()) is None:
        return "no ninja", "pip install ninja"
    return None
