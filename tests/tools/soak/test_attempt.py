"""A start of a run watched from outside: what its files say, in which order its ranks are, and how its end is waited for."""

import os
import subprocess
from types import SimpleNamespace

import psutil
import pytest

from tools.soak import attempt
from tools.soak.attempt import Attempt, last_row, newest_step

HEADER = "step,loss\n"


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", 0),
        (HEADER, 0),
        (HEADER + "1,2.5\n2,2.4\n", 2),
        # A row that is still being written, or torn, is none yet.
        (HEADER + "1,2.5\n2,2.", 1),
        (HEADER + "".join(f"{step},{'5' * 100}\n" for step in range(1, 51)), 50),
    ],
)
def test_the_last_whole_row_is_the_last_step(text, step, tmp_path):
    (tmp_path / "steps.csv").write_text(text)
    assert last_row(tmp_path / "steps.csv") == step
    assert last_row(tmp_path / "missing.csv") == 0


def test_the_newest_checkpoint_is_the_one_with_the_highest_step(tmp_path):
    assert newest_step(tmp_path) == 0
    for name in ("step-8", "step-12", "step-16.corrupt", ".tmp-step-20-ab"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_step(tmp_path) == 12


def test_a_checkpoint_that_has_its_name_before_its_manifest_is_noted(tmp_path):
    seen = SimpleNamespace(run=tmp_path, wrong=[])
    (tmp_path / "checkpoints" / "step-8").mkdir(parents=True)
    Attempt.look_for_manifest(seen)
    (tmp_path / "checkpoints" / "step-8" / "manifest.json").touch()
    Attempt.look_for_manifest(seen)
    assert seen.wrong == ["step-8 got its name before its manifest"]


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Return a function that starts a shell command in the place of a run whose folder is `tmp_path`."""
    started = []

    def start(program, environment, stdout, stderr):
        started.append(subprocess.Popen(program, stdout=stdout, stderr=stderr))
        return started[-1]

    monkeypatch.setattr(attempt, "start_process", start)
    yield lambda command: Attempt(["sh", "-c", command], 2, tmp_path, tmp_path / "log")
    for process in started:
        process.kill()
        process.wait()


def test_rows_of_an_earlier_start_do_not_count(begin, tmp_path):
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    rows = tmp_path / "steps.csv"
    rows.write_text(HEADER + "4,2.5\n6,2.4\n")
    os.utime(rows, (1, 1))
    run = begin("exec sleep 60")
    assert (run.begun_at, run.done_step()) == (4, 0)
    # Rows beyond the checkpoint move aside when the run has found it.
    rows.write_text(HEADER + "4,2.5\n")
    assert run.done_step() == 0
    rows.write_text(HEADER + "4,2.5\n5,2.5\n")
    assert run.done_step() == 5


def test_an_end_has_its_status_and_its_output(begin):
    run = begin("echo said; exit 7")
    assert run.end(60.0) == 7
    assert run.output() == "said\n"
    assert not run.wait_until(lambda: False)
    assert run.wait_until(lambda: True)


def test_a_run_that_hangs_is_killed(begin):
    run = begin("exec sleep 60")
    assert run.end(0.0) is None
    assert run.process.poll() == -9


def test_ranks_are_in_the_order_of_their_numbers(begin, monkeypatch):
    names = ["rank 10", "data worker", "rank 2", "rank 0"]
    children = [SimpleNamespace(name=lambda name=name: name) for name in names]
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(children=lambda recursive: children))
    run = begin("exec sleep 60")
    assert [process.name() for process in run.ranks()] == ["rank 0", "rank 2", "rank 10"]
    assert not run.has_ranks()
    assert len(run.family) == 4


def test_a_process_that_outlives_its_launcher_is_named_and_killed(begin, monkeypatch):
    monkeypatch.setattr(attempt, "ORPHAN_LIMIT_S", 0.05)
    run = begin("exec sleep 60")
    run.family = [psutil.Process(run.process.pid)]
    assert run.wait_until(lambda: run.family[0].name() == "sleep")
    assert run.orphans() == [f"sleep (pid {run.process.pid})"]
    run.process.wait(60)
    assert run.orphans() == []
