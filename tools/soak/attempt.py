"""One start of a run, from its launcher to its last process, watched from outside by its files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import start_process

POLL_S = 0.001
# Far more than any start of a small run takes. Whatever is longer counts as a hang.
LIMIT_S = 120.0
ORPHAN_LIMIT_S = 10.0


class Attempt:
    """A started run in the folder `run`. Its output goes to the file `log`.

    begun_at: the step of the newest checkpoint before the start. wrong: what was seen while it ran and should not have been.
    """

    def __init__(self, program: Program, nproc: int, run: Path, log: Path) -> None:
        self.nproc, self.run, self.log = nproc, run, log
        self.begun_at = newest_step(run)
        self.wrong: list[str] = []
        self._rows_before = self._rows_version()
        self._began = time.monotonic()
        self.seconds = 0.0
        with log.open("ab") as output:
            self.process = start_process(
                program, {**os.environ, "OMP_NUM_THREADS": "1"}, stdout=output.fileno(), stderr=output.fileno()
            )
        self.family: list[psutil.Process] = []

    def wait_until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Wait for the condition, and return False if the run ends before or the limit passes."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks that run now, in their order, and remember all that belong to the run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family = psutil.Process(self.process.pid).children(recursive=True)
        ranks = []
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("rank "):
                    ranks.append((process.name(), process))
        return [process for _, process in sorted(ranks, key=lambda rank: int(rank[0].split()[1]))]

    def look_for_manifest(self) -> None:
        """Note a newest checkpoint that got its name before its manifest."""
        newest = step_folders(self.run / "checkpoints")[0]
        if newest.exists() and not (newest / "manifest.json").exists():
            self.wrong.append(f"{newest.name} got its name before its manifest")

    def has_ranks(self) -> bool:
        """Return whether all ranks have been started."""
        return len(self.ranks()) == self.nproc

    def end(self, limit_s: float) -> int | None:
        """Wait for the launcher's end and return its status, None if it had to be killed after `limit_s` seconds."""
        self.wait_until(lambda: False, limit_s)
        status = self.process.poll()
        self.seconds = time.monotonic() - self._began
        if status is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(ORPHAN_LIMIT_S)
        return status

    def orphans(self) -> list[str]:
        """Return the processes that outlive the launcher by more than ten seconds, and kill them."""
        deadline = time.monotonic() + ORPHAN_LIMIT_S
        while (alive := [process for process in self.family if _lives(process)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        names = []
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(f"{process.name()} (pid {process.pid})")
                process.kill()
        return names

    def done_step(self) -> int:
        """Return the last step that this start has done, 0 if none.

        Rows of an earlier start are in the file until this one has found its checkpoint.
        """
        step = last_row(self.run / "steps.csv")
        return step if step > self.begun_at and self._rows_version() != self._rows_before else 0

    def _rows_version(self) -> tuple[int, int]:
        try:
            stat = (self.run / "steps.csv").stat()
        except OSError:
            return 0, 0
        return stat.st_ino, stat.st_mtime_ns

    def output(self) -> str:
        """Return what the run has printed so far."""
        return self.log.read_text(errors="replace")


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return next((int(path.name.split("-")[1]) for path in step_folders(run / "checkpoints")), 0)


def last_row(path: Path) -> int:
    """Return the step of the last whole row of a CSV, 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 400))
            rows = file.read().split(b"\n")[:-1]
        return int(rows[-1].split(b",")[0])
    except (OSError, IndexError, ValueError):
        return 0


def _lives(process: psutil.Process) -> bool:
    """Return whether a process runs. One that has ended and waits for its parent to notice does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.is_running()
    except psutil.NoSuchProcess:
        return False
