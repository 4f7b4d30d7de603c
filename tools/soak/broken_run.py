"""One run that is broken several times, goes on each time, and in the end is compared with an unbroken one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from gptscale.common.checkpoint.folders import step_folders
from gptscale.common.errors import INTERRUPTED_EXIT_STATUS, PREEMPTED_EXIT_STATUS, GptscaleError
from gptscale.results.record.run_folder import has_its_row
from tools.soak.attempt import LIMIT_S, Attempt, newest_step
from tools.soak.contract import Bytes, broken_promises, bytes_of
from tools.soak.disk import SmallDisk
from tools.soak.faults import BAD, Fault, Scene
from tools.soak.lost_bits import lost_bits
from tools.soak.moments import Moment
from tools.soak.work import RUN_NAME, STEPS, SoakWork

FINISHED = "finish"


@dataclass
class Outcome:
    """How a run ended after one fault, or, as the fault FINISHED, after its last start.

    status: None if it had to be killed. wrong: what it should not have done. lost_bits: of the whole run that had the fault.
    """

    recipe: str
    run: str
    options: str
    fault: str
    moment: str
    status: int | None
    seconds: float
    wrong: list[str] = field(default_factory=list)
    lost_bits: int = 0


class BrokenRun:
    """A run of `work` in a new `folder`, into which faults strike in turn.

    Its results are on `disk` if that is given, and in the folder if not. The logs of its starts are in the folder.
    """

    def __init__(self, work: SoakWork, folder: Path, disk: SmallDisk | None = None) -> None:
        self.work, self.folder, self.disk = work, folder, disk
        folder.mkdir(parents=True)
        if disk:
            disk.clear()
        self.out = disk.folder if disk else folder
        self.run = self.out / "runs" / RUN_NAME
        self.checkpoints = self.run / "checkpoints"
        self.n_starts = 0
        self._options = " ".join(work.varied)

    def carry_out(self, faults: Sequence[Fault], unbroken: Path, seed: str) -> list[Outcome]:
        """Let the faults strike, finish the run, compare it with the unbroken one, and return how it ended each time.

        A run that reached its last step has no later faults, and damage needs two checkpoints.
        """
        outcomes = []
        for index, fault in enumerate(faults):
            if newest_step(self.run) == STEPS:
                break
            outcome = self._break(fault, Random(f"{seed} {index}"))
            if outcome is not None:
                outcomes.append(outcome)
        outcomes.append(last := self.finish())
        if not last.wrong:
            lost = lost_bits(self.run, unbroken)
            for outcome in outcomes:
                outcome.lost_bits = lost
        if self.disk and any(outcome.wrong or outcome.lost_bits for outcome in outcomes):
            shutil.copytree(self.out, self.folder / "disk", ignore_dangling_symlinks=True)
        return outcomes

    def finish(self) -> Outcome:
        """Let the run reach its last step."""
        outcome = Outcome(self.work.recipe, self.folder.name, self._options, FINISHED, "", 0, 0.0)
        if not has_its_row(self.run, STEPS):
            attempt = self._start()
            attempt.wait_until(attempt.has_ranks)
            outcome.status = attempt.end(LIMIT_S)
            outcome.seconds = attempt.seconds
            outcome.wrong = self._judge(attempt, outcome.status, (0,), {})
        if outcome.status == 0 and not has_its_row(self.run, STEPS):
            outcome.wrong.append("the run ended without its row")
        left = [path.name for path in self.checkpoints.glob(".tmp-*")]
        outcome.wrong += [f"{name} is left behind" for name in left]
        return outcome

    def _break(self, fault: Fault, random: Random) -> Outcome | None:
        """Start the run, let the fault strike, and return how the run ended, None if the fault found nothing to strike."""
        moment = Moment.draw(random, fault.moments)
        saved = step_folders(self.checkpoints)
        copy = self.folder / "checkpoints"
        if fault.damage:
            if len(saved) < 2:
                return None
            shutil.copytree(self.checkpoints, copy)
            fault.damage(self.checkpoints, random)
        attempt = self._start(short_timeout=fault.short_timeout)
        struck = moment.wait(attempt)
        # This remembers the processes whose end is judged later.
        attempt.ranks()
        before = {} if fault.damage else bytes_of(self.run)
        if struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                fault.strike(attempt, Scene(self.run, self.disk, random))
        status = attempt.end(fault.limit_s)
        if self.disk:
            self.disk.free()
        early = () if attempt.done_step() else fault.early
        wrong = self._judge(attempt, status, (*fault.statuses, *early), before)
        if fault.damage:
            wrong += self._judge_damage(fault, saved, copy)
            shutil.rmtree(copy)
        # The run was over before the fault, or while it struck.
        if status == 0 and not wrong[1:]:
            return None
        name = f"{moment.name} +{moment.steps}" if moment.name == "step" else moment.name
        return Outcome(
            self.work.recipe, self.folder.name, self._options, fault.name, name, status, attempt.seconds, wrong
        )

    def _start(self, *, short_timeout: bool = False) -> Attempt:
        """Begin the run, or go on with it."""
        self.n_starts += 1
        program = self.work.program(self.out, short_timeout=short_timeout)
        return Attempt(program, self.work.nproc, self.run, self.folder / f"start-{self.n_starts}.log")

    def _judge(self, attempt: Attempt, status: int | None, allowed: Sequence[int], before: Bytes) -> list[str]:
        """Return what is wrong with an end."""
        wrong = [] if status in allowed else [f"status {status}, not {' or '.join(map(str, allowed))}"]
        wrong += [f"{orphan} is left running" for orphan in attempt.orphans()]
        wrong += attempt.wrong
        output = attempt.output()
        if "Traceback" in output:
            wrong.append("a traceback")
        saves = status in (PREEMPTED_EXIT_STATUS, INTERRUPTED_EXIT_STATUS)
        if status is not None and status > 0 and not saves and "gptscale: error: " not in output:
            wrong.append("no line says why")
        if saves and attempt.done_step() > newest_step(self.run):
            wrong.append(f"step {attempt.done_step()} is not saved, only {newest_step(self.run)}")
        return wrong + broken_promises(self.run, before)

    def _judge_damage(self, fault: Fault, saved: Sequence[Path], copy: Path) -> list[str]:
        """Return which damaged checkpoint was not set aside, and undo damage after which a run cannot go on."""
        damaged = saved if BAD in fault.statuses else saved[:1]
        wrong = [f"{path.name} was not set aside" for path in damaged if not any(self._aside(path))]
        if BAD in fault.statuses:
            shutil.rmtree(self.checkpoints)
            shutil.copytree(copy, self.checkpoints)
        return wrong

    def _aside(self, checkpoint: Path) -> list[Path]:
        return list(self.checkpoints.glob(f"{checkpoint.name}.corrupt*"))


def unbroken_run(work: SoakWork, folder: Path) -> Path:
    """Train without any fault and return the run's folder. Raises GptscaleError if that fails."""
    run = BrokenRun(work, folder)
    outcome = run.finish()
    if outcome.wrong:
        raise GptscaleError(
            f"{work.recipe} fails without any fault ({'; '.join(outcome.wrong)})", f"in {folder}", "see its log there"
        )
    return run.run
