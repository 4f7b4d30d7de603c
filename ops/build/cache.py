"""Compiled code kept for this user: built aside, moved into place when it is whole, one build at a time."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from gptscale.common.errors import ConfigError, StorageError


def root() -> Path:
    """The folder under which all of it lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptscale"


def private(folder: Path) -> Path:
    """`folder` under the root, made if it is not there, and private to the user (0700): what lies in it is executed.

    Raises StorageError if it belongs to another user.
    """
    levels = [folder, *folder.parents]
    for level in reversed(levels[: levels.index(root()) + 1]):
        level.mkdir(mode=0o700, parents=True, exist_ok=True)
        if level.stat().st_uid != os.getuid():
            raise StorageError(
                f"{level} belongs to another user", "in the operator cache", "set XDG_CACHE_HOME to your own"
            )
        level.chmod(0o700)
    return folder


def build_once(
    target: Path, build: Callable[[Path], Path], say: Callable[[str], object] = print, *, wait_s: float
) -> bool:
    """Make `target` unless it is there: `build(work)` compiles in an empty folder and returns what is to be moved to it.

    Whether it was built now. Nothing that a killed build leaves can stop a later one: the kernel frees the lock of a dead
    process. Raises ConfigError if another process is still compiling after `wait_s` seconds.
    """
    if target.exists():
        return False
    folder = private(target.parent)
    lock = FileLock(folder / ".prepare.lock")
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise ConfigError(
            "another `gptscale prepare` is compiling", f"under {folder}", "wait for it, or end that process"
        ) from None
    with lock:
        for left in folder.glob(".building-*"):  # by a build that was killed; nobody else builds while we hold the lock
            say(f"removing what a killed compile left: {left.name}")
            shutil.rmtree(left)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
                os.rename(build(Path(work)), target)
    return True


def search_path() -> str:
    """PATH with this environment's own programs first: ninja is one."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def tool_missing() -> tuple[str, str] | None:
    """What a C++ extension cannot be compiled without and is not here, and the line that installs it."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler", "apt-get install g++"
    if shutil.which("ninja", path=search_path()) is None:
        return "no ninja", "pip install ninja"
    return None
