"""The runs of `gptscale bench verdict`: each in its own folder, with what the case asks beside it, and again if disturbed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.measure.evidence import VERDICT
from gptscale.common.process.fork_server import die_with_parent
from gptscale.launchers.bench.measurement import tell
from gptscale.launchers.bench.quiet import taken_since
from gptscale.launchers.bench.verdict.cases import InjectedCase, RunSetting
from gptscale.launchers.bench.verdict.report import drift
from gptscale.results.record.files import write_json

RUN_LIMIT_S = 300.0
BUSY = "while True: pass"
# How often a run is started until nobody disturbs it.
TRIES = 5
# The runs before and after a case may differ by this share. If they differ by more, the machine's own speed changed, and the
# case is run again, at most so many times in all.
DRIFT_MAX, CASE_TRIES = 0.10, 3


@dataclass
class RunsOfABench:
    """The runs of cases. A run without a cause that ends one case begins the next one too, if that is cured by the same.

    allow_busy: whether to keep a run of which other programs took a part. verdicts: the folder that gets the verdicts of runs
    with a name, None for none.
    """

    steps: int
    allow_busy: bool = False
    verdicts: Path | None = None
    _last_cure: tuple[str, RunSetting, dict[str, Any]] | None = None

    def of_case(self, case: InjectedCase, repeat: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the run of a case, and those without its cause just before and after it, none for a healthy one."""
        name = f"{case.name}-{repeat}"
        if case.cured is None:
            return self.run(case.recipe, case.slow, name), []
        for _ in range(CASE_TRIES):
            if self._last_cure and self._last_cure[:2] == (case.recipe, case.cured):
                before = self._last_cure[2]
            else:
                before = self.run(case.recipe, case.cured)
            slow, after = self.run(case.recipe, case.slow, name), self.run(case.recipe, case.cured)
            self._last_cure = (case.recipe, case.cured, after)
            if (apart := drift([before, after])) <= DRIFT_MAX:
                break
            tell(f"... steps without the cause were {apart:.0%} apart before and after {case.name}")
        return slow, [before, after]

    def run(self, recipe: str, setting: RunSetting, name: str = "") -> dict[str, Any]:
        """Return the row and the verdict of a run, and as `foreign` what other programs took of the machine meanwhile.

        Raises ConfigError if the machine stays busy.
        """
        from gptscale.common.measure.contention import MachineClock
        from gptscale.common.measure.limits import TAKEN_MAX

        for _ in range(TRIES):
            clock = MachineClock(threads=len(os.sched_getaffinity(0)))
            ended = run_once(recipe, setting, self.steps)
            ended["foreign"] = foreign = taken_since(clock)
            if self.allow_busy or foreign <= TAKEN_MAX:
                if self.verdicts is not None and name:
                    folder = self.verdicts / name
                    folder.mkdir(parents=True, exist_ok=True)
                    write_json(folder / VERDICT, ended["verdict"])
                return ended
            tell(f"... again, since other programs took {foreign:.0%} of the machine")
        what = f"other programs took {foreign:.0%} of the machine's processors"
        raise ConfigError(
            what, f"in {TRIES} tries of a run of {recipe}", "call again when it is quiet, or with --allow-busy"
        )


def run_once(recipe: str, setting: RunSetting, steps: int) -> dict[str, Any]:
    """Run a setting in a folder of its own, and return its row of the summary and its verdict."""
    from gptscale.common.process.program import Program
    from gptscale.common.process.warm_parent import run_captured
    from gptscale.foresight.verdict.of_run import judge_run
    from gptscale.launchers.bench.verdict.worker import MODULE
    from gptscale.recipes import get

    folder = Path(tempfile.mkdtemp(prefix="gptscale-verdict-"))
    try:
        words = [*setting.options, "--steps", str(steps), "--out", str(folder), "--run-name", "run"]
        words += ["--nvme-path", str(folder / "nvme")] if recipe == "zero_infinity" else []
        (folder / "nvme").mkdir()
        task = json.dumps([recipe, words, dict(setting.injected), setting.nproc, dict(setting.environment)])
        program = Program(MODULE, ("launch", task), imports=get(recipe).imports)
        with programs_beside(setting.beside):
            ended = run_captured(program, timeout=RUN_LIMIT_S)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"a run of {recipe} failed: {last[:300]}", "in bench verdict", "see gptscale doctor")
        # Its ranks were started without a launcher that asks the lab.
        judge_run(folder / "runs/run")
        with (folder / "summary.csv").open(newline="") as file:
            row: dict[str, Any] = list(csv.DictReader(file))[-1]
        verdict = json.loads((folder / "runs/run" / VERDICT).read_text())
        return row | {key: verdict[key] for key in ("causes", "remedied_s", "shares", "spread")} | {"verdict": verdict}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def programs_beside(cpus: tuple[int, ...] | None) -> Iterator[None]:
    """Keep these processors busy, each by a program of our own, until the end. None: all that there are."""
    usable = sorted(os.sched_getaffinity(0))
    programs = []
    try:
        for i in range(len(usable)) if cpus is None else cpus:
            # It also ends if this process is killed.
            program = subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=die_with_parent)
            programs.append(program)
            os.sched_setaffinity(program.pid, {usable[i % len(usable)]})
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()
