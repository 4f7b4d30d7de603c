"""A folder on disk that holds training state during a run and is deleted with it."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World, gather_objects

PREFIX = "gptscale-swap-"


def check_space(folder: Path | None, default: Path, needed_bytes: int, world: World) -> None:
    """Raise ConfigError unless `folder`, or else `default`, which may not exist yet, has room for this node's share."""
    parent = folder or next(p for p in (default.absolute(), *default.absolute().parents) if p.exists())
    nodes = max(1, world.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size)))
    check_folder(parent, needed_bytes // nodes)


def check_folder(parent: Path, needed_bytes: int) -> None:
    """Raise ConfigError unless `parent` is a folder that can be written, with `needed_bytes` free."""
    if not parent.is_dir():
        raise ConfigError(f"{parent} is no folder", "in --nvme-path", "give a folder on a fast local disk")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{parent} cannot be written", "in --nvme-path", "give a folder that can")
    free_bytes = shutil.disk_usage(parent).free + sum(nbytes_under(old) for old in abandoned(parent))
    if free_bytes < needed_bytes:
        what = f"{parent} has {free_bytes:,} bytes free, {needed_bytes:,} are needed"
        raise ConfigError(what, "in --nvme-path", "give a larger disk")


def abandoned(parent: Path) -> list[Path]:
    """Return the swap folders of this user under `parent` whose run is gone, so that nobody holds their lock."""
    folders = []
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            continue
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        lock.release()
        folders.append(folder)
    return folders


def nbytes_under(folder: Path) -> int:
    """Return the bytes of the files below `folder`."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class SwapFolder:
    """The folder `parent`/gptscale-swap-<id>-<node>, the same on every rank of a node.

    Every rank must call the constructor. The first process of each node holds the folder's lock. The kernel releases the lock
    however that process ends, so the next run can tell a folder in use from an abandoned one, and it removes the latter.
    """

    def __init__(self, parent: Path, world: World) -> None:
        # The name has the first rank of this node, because nodes may share the file system.
        name = f"{gather_objects(f'{PREFIX}{uuid.uuid4().hex[:12]}')[0]}-{world.rank - world.local_rank}"
        # It is made and locked under another name. So, once it has its final name, every other run sees that it is in use.
        new, self.path = parent.absolute() / f".{name}", parent.absolute() / name
        self._lock = FileLock(new / ".lock")
        if world.local_rank == 0:
            for old in abandoned(parent):
                # Another run may be deleting it at the same time.
                shutil.rmtree(old, ignore_errors=True)
            new.mkdir(mode=0o700)
            self._lock.acquire(timeout=10)
            new.rename(self.path)
        gather_objects(None)

    def close(self) -> None:
        """Delete it, on whichever rank comes first, because no rank takes a step after one has come here."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()
