"""The bench of verdicts knows its cases, goes on where it stopped, runs again what was disturbed, and counts right words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.verdict import command, runs
from benchmarks.verdict.cases import HEALTHY, RECIPES, RunSetting, cases
from benchmarks.verdict.report import gain_error, goals_of, p95, step_error
from benchmarks.verdict.runs import TRIES, RunsOfABench
from gptscale.common.errors import ConfigError
from gptscale.foresight.verdict.remedies import CAUSES, CONTENDED, DATA
from gptscale.launchers.run.options import parse_run


@pytest.mark.slow
def test_every_case_has_options_that_its_recipe_takes() -> None:
    every = list(cases())
    assert {case.recipe for case in every} == {*RECIPES, "zero_infinity"}
    assert {case.word for case in every} <= {*CAUSES, ""}
    for case in every:
        for setting in (case.slow, case.cured):
            if setting is not None and case.recipe != "zero_infinity":
                parse_run(case.recipe, list(setting.options))


def as_run(said: str, step_s: float, without_s: float) -> dict[str, Any]:
    return {
        "bound_by": said,
        "step_time_s_median": str(step_s),
        "causes": [{"name": DATA, "without_s": without_s}],
        "remedied_s": None,
        "taken_fraction": "",
        "late_rank": "",
        "spread": 0.02,
        "tokens_total": "200",
        "steps": "20",
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs are figures here: a slow reader that is found, one that is taken for a machine in use, and a healthy run."""
    names: list[str] = []

    def run_once(recipe: str, setting: RunSetting, steps: int) -> dict[str, Any]:
        names.append(recipe)
        slow = bool(setting.injected)
        said = {(True, "ddp"): DATA, (True, "fsdp"): CONTENDED}.get((slow, recipe), "compute-bound")
        return as_run(said, 0.6 if slow else 0.1, 0.11)

    monkeypatch.setattr(runs, "run_once", run_once)
    monkeypatch.setattr(runs, "taken_since", lambda clock: 0.01)
    return names


def test_rows_are_kept_counted_and_not_measured_again(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--causes", f"slow reader,{HEALTHY}", "--recipes", "ddp,fsdp", "--repeats", "1"]
    words += ["--csv", str(tmp_path / "v.csv")]
    assert command.main(words) == 1
    out = capsys.readouterr().out
    assert re.search(r"slow reader +2 +1 +1 +0 +81.7% +83.3% +2.0% +2.0% +10.0%", out)
    assert re.search(r"healthy +2 +2 +0 +0 +- ", out)
    assert "missed  right word in 3 of 4" in out
    assert "missed  wrong word in 1 of 4" in out
    assert "met     a word in 0 healthy runs" in out
    assert "promised gains beside real ones: median 2.0% off" in out
    assert "promised steps beside cured ones: median 10.0% off" in out
    assert started == ["ddp"] * 4 + ["fsdp"] * 4
    assert command.main(words) == 1
    assert len(started) == 8
    assert capsys.readouterr().out == out


def test_a_bench_in_pieces_goes_on_where_it_was_cut(
    tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "v.csv"
    words = ["--causes", HEALTHY, "--recipes", "ddp,fsdp,zero2", "--repeats", "1", "--csv", str(file)]
    assert command.main([*words, "--minutes", "0"]) == 1
    assert (started, file.exists()) == ([], False)
    assert "3 cases were left" in capsys.readouterr().err
    assert command.main(words) == 0
    # A line that was cut is measured again.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:30])
    assert command.main(words) == 0
    assert started == ["ddp", "fsdp", "zero2", "zero2"]
    assert file.read_text().splitlines(keepends=True)[:3] == lines[:3]
    file.write_text("cause,recipe,repeat,right\nhealthy,ddp,0,True\n")
    with pytest.raises(ConfigError, match="another version"):
        command.main(words)


def test_a_disturbed_run_is_run_again_and_refused_if_that_does_not_end(
    started: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = iter([0.3, 0.01, *[0.2] * TRIES, 0.4])
    monkeypatch.setattr(runs, "taken_since", lambda clock: next(taken))
    bench = RunsOfABench(steps=20)
    assert bench.run("ddp", RunSetting(()))["foreign"] == 0.01
    assert len(started) == 2
    assert "again, since other programs took 30%" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"took 20%.*--allow-busy"):
        bench.run("fsdp", RunSetting(()))
    assert len(started) == 2 + TRIES
    assert RunsOfABench(steps=20, allow_busy=True).run("ddp", RunSetting(()))["foreign"] == 0.4


def test_a_case_is_run_between_two_runs_without_its_cause_that_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run between two cases serves both. A case is run again if the machine changed meanwhile, but not for ever."""
    in_use, slow_link = (
        next(c for c in cases() if (c.cause, c.recipe) == (cause, "ddp")) for cause in ("machine in use", "slow link")
    )
    cured_s = iter([0.1, 0.105, 0.2, 0.21, 0.1, 0.2, 0.3])
    order: list[str] = []

    def run_once(recipe: str, setting: RunSetting, steps: int) -> dict[str, Any]:
        order.append("cured" if setting == in_use.cured else "slow")
        return as_run("", next(cured_s) if setting == in_use.cured else 0.6, 0.11)

    monkeypatch.setattr(runs, "run_once", run_once)
    monkeypatch.setattr(runs, "taken_since", lambda clock: 0.01)
    bench = RunsOfABench(steps=20)
    found = [bench.of_case(case, 0)[1] for case in (in_use, slow_link, in_use)]
    assert [[run["step_time_s_median"] for run in pair] for pair in found] == [
        ["0.1", "0.105"],
        ["0.2", "0.21"],
        ["0.2", "0.3"],
    ]
    assert order == ["cured", *["slow", "cured"] * 6]
    err = capsys.readouterr().err
    assert "steps without the cause were 62% apart before and after slow-link-ddp" in err
    assert len(err.splitlines()) == 4


def test_errors_are_of_the_gain_and_of_the_step() -> None:
    row = {"real_gain": 0.5, "promised_gain": 0.4, "promised_ms": 60.0, "cured_ms": 50.0}
    assert (gain_error(row), step_error(row)) == (pytest.approx(0.2), pytest.approx(0.2))
    assert gain_error(row | {"real_gain": ""}) is None
    assert gain_error(row | {"real_gain": -0.1}) is None
    assert step_error(row | {"cured_ms": ""}) is None
    assert [p95([0.1]), p95(list(range(100))), p95(list(range(20)))] == [0.1, 94, 18]


def test_goals_are_those_of_the_issue() -> None:
    right = {"right": True, "said": DATA, "expected": DATA, "real_gain": 0.5, "promised_gain": 0.52}
    right |= {"promised_ms": 48.0, "cured_ms": 50.0}
    assert all(goals_of([right] * 100).values())
    healthy = right | {"right": False, "expected": "", "real_gain": "", "cured_ms": ""}
    assert list(goals_of([right] * 99 + [healthy]).values()) == [True, True, False, True, True]
    wrong = right | {"right": False, "said": CONTENDED}
    assert list(goals_of([right] * 98 + [wrong] * 2).values()) == [True, False, True, True, True]
    far = right | {"promised_gain": 0.7}
    assert list(goals_of([right] * 94 + [far] * 6).values()) == [True, True, True, False, True]


def test_programs_beside_end_with_the_run() -> None:
    before = set(psutil.Process().children())
    with runs.programs_beside((0,)):
        (busy,) = set(psutil.Process().children()) - before
        assert busy.cpu_affinity() is not None
        assert len(busy.cpu_affinity() or []) == 1
    assert not psutil.pid_exists(busy.pid) or busy.status() == psutil.STATUS_ZOMBIE
