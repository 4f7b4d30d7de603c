"""The processes of a program of others: it is started with files of ours on its path, watched, and none is left running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from gptscale.common.errors import GptscaleError
from gptscale.common.process.warm_parent import Process

TAIL_BYTES, TAIL_LINES, LINE_MAX = 1 << 16, 20, 1000
# Seconds for a program to leave by itself, once its report is there.
GRACE_S, LOOK_S = 10.0, 0.5
# Nothing is downloaded, uploaded or asked of a machine that is not there.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled"}

# Starts a program, given its command, environment, folder, and the file that it prints into.
Start = Callable[[Sequence[str], Mapping[str, str], Path | None, int], Process]


class ProgramError(GptscaleError):
    """A program that cannot be simulated. tail: its own last lines, or where it waited."""

    exit_status = 2

    def __init__(self, what: str, fix: str, tail: str = "") -> None:
        super().__init__(what, "in the program", fix)
        self.tail = tail


def put_on_path(path: Path, start: Path, modules: Sequence[Path]) -> None:
    """Make a folder for PYTHONPATH of a file that Python starts with, and of modules which that finds as gptscale_NAME."""
    path.mkdir()
    shutil.copy(start, path / "sitecustomize.py")
    for module in modules:
        shutil.copy(module, path / f"gptscale_{module.name}")


def own_environment(path: Path) -> dict[str, str]:
    """Return this environment without proxies, and with a folder before all others on the path of Python."""
    environ = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return environ | OFFLINE | {"PYTHONPATH": ":".join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))}


def afresh(command: Sequence[str], environ: Mapping[str, str], folder: Path | None, output: int) -> Process:
    """Start a program in a folder, None for the current one. output: what it prints into."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return subprocess.Popen([*command], cwd=folder, env=environ, start_new_session=True, **streams)


@contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, cwd: Path | None = None, start: Start = afresh
) -> Iterator[tuple[Process, Callable[[], str], set[psutil.Process]]]:
    """Start a program, keep the end of what it prints, and leave nothing of it running, nor of its family.

    folder: named in its environment, by which its processes are known. cwd: where it runs, None for the current one.
    The caller puts the processes that it sees into the family.
    """
    printed, output = os.pipe()
    process = start(command, environ, cwd, output)
    os.close(output)
    kept, family = bytearray(), set[psutil.Process]()

    def keep() -> None:
        while chunk := os.read(printed, 1 << 16):
            kept.extend(chunk)
            del kept[:-TAIL_BYTES]
        os.close(printed)

    reader = threading.Thread(target=keep, daemon=True)
    reader.start()
    try:
        yield process, lambda: kept.decode(errors="replace"), family
    finally:
        process.send_signal(signal.SIGKILL)
        # Those with an environment of their own have no folder in it.
        for child in filter(psutil.Process.is_running, family):
            _kill(child.pid)
        while left := [*_processes_of(folder)]:
            for pid in left:
                _kill(pid)
            time.sleep(0.02)
        process.wait()
        reader.join(GRACE_S)


def _processes_of(folder: Path) -> Iterator[int]:
    """Yield the processes that a program has started, wherever they went: all have its folder in their environment."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.fsencode(folder) in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:
            continue


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def resident(each: psutil.Process) -> int:
    """Return the bytes of memory that a process has for itself."""
    with suppress(psutil.Error):
        memory = each.memory_info()
        return int(memory.rss - memory.shared)
    return 0


def last_lines(text: str) -> str:
    """Return the last lines of what a program has printed."""
    return "\n".join(line[:LINE_MAX] for line in text.strip().splitlines()[-TAIL_LINES:])


def print_error(error: ProgramError) -> int:
    """Print a program's error in one line, its own last lines beneath it, and return the exit status."""
    print(f"gptscale: error: {error}", file=sys.stderr)
    if error.tail:
        print(error.tail, file=sys.stderr, flush=True)
    return error.exit_status
