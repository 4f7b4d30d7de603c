"""The folder that keeps this user's compiled code, and how a build enters it: whole, and one build at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from filelock import FileLock, Timeout

OWN_CACHE = "set XDG_CACHE_HOME to a folder of your own"
# seconds without a sign of life from the process that compiles. One file of DeepSpeed takes 150 s on a busy machine.
LOCK_WAIT_S = 300.0


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
    """A folder or file of the cache that is not this user's alone, or cannot be made."""


def root() -> Path:
    """Return the folder that everything of the cache lies under."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):
        _refuse("this user has no home folder", OWN_CACHE)
    return Path(cache).absolute() / "gptscale"


def private(folder: Path) -> Path:
    """Create `folder` under the root, for this user alone (0700), and check every level of it. See `check_private`."""
    check_private(folder)
    try:
        for level in reversed([folder, *folder.parents]):
            level.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        _refuse(str(error), OWN_CACHE)
    return folder


def check_private(
    path: Path, base: Path | None = None, variable: str = "XDG_CACHE_HOME", *, whole: bool = False
) -> None:
    """Raise CacheFolderError if another user could have put `path` there, or could change it.

    path: a file or folder at or under `base`, the cache of compiled code that `variable` names; None is `root()`. What does not
    exist yet is fine. What lies there is executed. So every level from `base` on must be this user's own, and nobody else may
    write to it. Above it, other users may write to a folder with the sticky bit, such as /tmp, because there they cannot replace
    what is ours. Nothing is repaired: what lies in a folder that was open may be planted already.
    whole: check all that lies in the folder `path`, too.
    """
    base, user, own = base or root(), os.getuid(), f"set {variable} to a folder of your own"
    # In a container without root, its folders show the owner of / instead.
    trusted = {0, user, os.stat("/").st_uid}
    for level in reversed([*base.parents, *base.parent.resolve().parents, base.parent.resolve()]):
        facts = _facts(level)
        is_open = facts is not None and facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
        if facts is not None and ((is_open and not stat.S_ISLNK(facts.st_mode)) or facts.st_uid not in trusted):
            _refuse(f"other users may replace what lies in {level}", own)
    levels = reversed([path, *path.parents][: len(path.relative_to(base).parts) + 1])
    # Files that go away meanwhile are left out.
    below = (Path(folder, name) for folder, *names in os.walk(path) for name in itertools.chain(*names))
    for level in itertools.chain(levels, below if whole else ()):
        facts = _facts(level)
        if facts is None:
            continue
        if stat.S_ISLNK(facts.st_mode):
            _refuse(f"{level} is a symbolic link", f"rm {shlex.quote(str(level))}, or {own}")
        # A build is a folder: without its library it is no build, and would not be made anew.
        remove = f"rm -r {shlex.quote(str(level.parent if '.so' in level.suffixes else level))}"
        if facts.st_uid != user:
            _refuse(f"{level} belongs to another user", f"{remove}, or {own}")
        if facts.st_mode & 0o022:
            mend = f"chmod go-w {shlex.quote(str(level))}" if stat.S_ISDIR(facts.st_mode) else remove
            _refuse(f"{level} may be written by other users", mend)


def _facts(path: Path) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return path.lstat()
    return None


def _refuse(what: str, fix: str) -> NoReturn:
    raise CacheFolderError(what, "in a cache of compiled code, whose files are executed", fix)


def build_once(
    target: Path, build: Callable[[Path], Path], say: Callable[[str], object] = print, *, wait_s: float = LOCK_WAIT_S
) -> bool:
    """Build `target` unless it exists, and return whether this call built it.

    `build(work)` compiles in the empty folder `work` and returns the path that is then moved to `target`. Nothing that
    a killed build leaves behind can stop a later one, because the kernel frees the lock of a dead process. Raises
    BuildError if another process holds the lock, and for `wait_s` seconds has written no file of a build.
    """
    check_private(target)
    if target.exists():
        return False
    folder, building = private(target.parent), f".building-{target.name}-"
    lock = FileLock(folder / f".{target.name}.lock", mode=0o600)
    check_private(Path(lock.lock_file))
    began = time.time()
    while not lock.is_locked:
        try:
            lock.acquire(timeout=min(1.0, wait_s))
        except Timeout:
            if time.time() - max(began, _last_written(folder, building)) > wait_s:
                raise BuildError(
                    f"another `gptscale prepare` is compiling, and has written nothing for {wait_s:g} s",
                    f"with the lock {lock.lock_file}",
                    f"wait for it, or end {_holder(lock.lock_file)}",
                ) from None
    with lock:
        # These belong to builds that were killed: nobody else builds while this process holds the lock.
        for abandoned in folder.glob(f"{building}*"):
            say(f"removing what a killed compile left: {abandoned.name}")
            shutil.rmtree(abandoned)
        if not target.exists():
            with tempfile.TemporaryDirectory(prefix=building, dir=folder) as work:
                os.rename(build(Path(work)), target)
    return True


def _holder(lock_file: str) -> str:
    """Name the process that holds a lock, as far as this system tells."""
    locks, inode = Path("/proc/locks"), os.stat(lock_file).st_ino
    lines = [line.split() for line in locks.read_text().splitlines()] if locks.exists() else []
    pids = [fields[4] for fields in lines if fields[-3].endswith(f":{inode}")]
    return f"process {pids[0]}" if pids else "that process"


def _last_written(folder: Path, building: str) -> float:
    """Return when a file was written last in a folder of `folder` whose name begins with `building`, or 0 if there is none."""
    times = [0.0]
    for path in folder.glob(f"{building}*/**/*"):
        with contextlib.suppress(OSError):
            # It may be gone by now.
            times.append(path.lstat().st_mtime)
    return max(times)


def compile_apart(command: list[str], work: Path, *, timeout_s: float, **variables: str) -> str | None:
    """Run a compiler as a process of its own, which writes for this user alone.

    Returns None if it succeeds, or else the line of its output that says why it failed.
    """
    log = work / "log"
    environ = {**os.environ, **variables, "PATH": search_path()}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, umask=0o077)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"it took more than {timeout_s:g} s, and was ended"
    finally:
        if process.poll() is None:
            _kill_with_children(process.pid)
            process.wait()
    if status == 0:
        return None
    # A compiler repeats names of files and pieces of sources, in whatever encoding they have.
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip()[:200] for line in lines if "rror" in line), f"exit status {status}")


def _kill_with_children(pid: int) -> None:
    """Kill a process and all that it has started: a compiler is started by ninja, and ninja by Python."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
        for child in children:
            _kill_with_children(int(child))


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
