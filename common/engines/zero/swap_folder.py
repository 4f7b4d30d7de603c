"""A folder on disk that holds training state while a run lasts, and not a moment longer if it can be helped."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World, gather_objects

PREFIX = "gptscale-swap-"


def check_space(given: Path | None, default: Path, needed_bytes: int, world: World) -> None:
    """ConfigError unless the folder `given` (or else `default`, which may not exist yet) has room for this node's share."""
    parent = given or next(p for p in (default.absolute(), *default.absolute().parents) if p.exists())
    nodes = max(1, world.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size)))
    check_folder(parent, needed_bytes // nodes)


def check_folder(parent: Path, needed_bytes: int, option: str = "--nvme-path") -> None:
    """ConfigError unless `parent` is a folder that can be written, with `needed_bytes` free; before anything is created."""
    if not parent.is_dir():
        raise ConfigError(f"{parent} is no folder", f"in {option}", "give a folder on a fast local disk")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{parent} cannot be written", f"in {option}", "give a folder that can")
    free_bytes = shutil.disk_usage(parent).free + sum(nbytes_under(old) for old in abandoned(parent))
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{parent} has {free_bytes:,} bytes free, {needed_bytes:,} are needed", f"in {option}", "give a larger disk"
        )


def abandoned(parent: Path) -> list[Path]:
    """Swap folders of this user under `parent` whose run is gone: nobody holds their lock."""
    found = []
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            continue
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        lock.release()
        found.append(folder)
    return found


def nbytes_under(folder: Path) -> int:
    """Bytes of the files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class SwapFolder:
    """`parent`/gptscale-swap-<id>-<node>, the same on every rank of a node; a collective constructor.

    Each node's first process holds its lock, which the kernel releases however that process ends, so that the next run
    can tell a folder in use from one that was left by a process killed outright, and remove the latter.
    """

    def __init__(self, parent: Path, world: World) -> None:
        # of this node: its first rank is in the name, for nodes may share the file system
        name = f"{gather_objects(f'{PREFIX}{uuid.uuid4().hex[:12]}')[0]}-{world.rank - world.local_rank}"
        # Made and locked under another name: from the moment it has its own it is in use for everyone who looks.
        new, self.path = parent.absolute() / f".{name}", parent.absolute() / name
        self._lock = FileLock(new / ".lock")
        if world.local_rank == 0:
            for old in abandoned(parent):
                shutil.rmtree(old, ignore_errors=True)  # another run's first process may be at it too
            new.mkdir(mode=0o700)
            self._lock.acquire(timeout=10)
            new.rename(self.path)
        gather_objects(None)

    def nbytes(self) -> int:
        """Bytes in it now, of all ranks of this node."""
        return nbytes_under(self.path)

    def close(self) -> None:
        """Delete it. Any rank may be the first: when one is here, none will step again."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()
