"""The bench of verdicts knows its cases, goes on where it stopped, and counts right and wrong words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from gptscale.foresight.verdict.remedies import CAUSES, CONTENDED, DATA
from gptscale.launchers.bench.verdict import command
from gptscale.launchers.bench.verdict.cases import HEALTHY, RECIPES, cases
from gptscale.launchers.run.options import parse_run


def test_every_case_has_options_that_its_recipe_takes() -> None:
    every = list(cases())
    assert {case.recipe for case in every} == {*RECIPES, "zero_infinity"}
    assert {case.word for case in every} <= {*CAUSES, ""}
    for case in every:
        for setting in (case.slow, case.cured):
            if setting is not None and case.recipe != "zero_infinity":
                parse_run(case.recipe, list(setting.options))


def test_rows_are_kept_counted_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The runs are figures here: a slow reader that is found, one that is taken for a machine in use, and a healthy run."""
    started: list[str] = []

    def run(recipe: str, setting: Any, steps: int) -> dict[str, Any]:
        started.append(recipe)
        slow = bool(setting.injected)
        said = {(True, "ddp"): DATA, (True, "fsdp"): CONTENDED}.get((slow, recipe), "compute-bound")
        causes = [{"name": DATA, "without_s": 0.11}]
        step_s = "0.6" if slow else "0.1"
        return {
            "bound_by": said,
            "step_time_s_median": step_s,
            "causes": causes,
            "remedied_s": None,
            "taken_fraction": "",
        }

    monkeypatch.setattr(command, "run", run)
    words = ["--causes", f"slow reader,{HEALTHY}", "--recipes", "ddp,fsdp", "--repeats", "1"]
    words += ["--csv", str(tmp_path / "v.csv")]
    assert command.main(words) == 1
    out = capsys.readouterr().out
    assert "missed  right word in 3 of 4" in out
    assert "missed  wrong word in 1 of 4" in out
    assert "met     a word in 0 healthy runs" in out
    assert "median 10.0% off" in out
    assert len(started) == 6
    assert command.main(words) == 1
    assert len(started) == 6
    assert capsys.readouterr().out == out


def test_programs_beside_end_with_the_run() -> None:
    before = set(psutil.Process().children())
    with command.programs_beside((0,)):
        (busy,) = set(psutil.Process().children()) - before
        assert busy.cpu_affinity() is not None
        assert len(busy.cpu_affinity() or []) == 1
    assert not psutil.pid_exists(busy.pid) or busy.status() == psutil.STATUS_ZOMBIE
