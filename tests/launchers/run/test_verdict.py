"""A verdict changes nothing of the run that it is about, and is there at its end."""

import json

import pytest
import worlds
from worlds import assert_same_state, ok, rows, steps

from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.foresight.verdict.files import read_verdict

SHAPE = "--nproc 2 --n-layer 1 --n-embd 32 --seq-len 32 --no-tensorboard --save-last".split()


@pytest.mark.parametrize("recipe", ["fsdp", "pipeline"])
def test_a_run_leaves_the_same_bits_with_a_verdict_and_without(recipe, tmp_path):
    words = [*SHAPE, "--steps", VERDICT_STEPS_MIN, "--out", tmp_path]
    words += ["--grad-accum-steps", 4] if recipe == "pipeline" else []
    without = ok("run", recipe, *words, "--run-name", "without", "--no-verdict").stdout
    with_one = ok("run", recipe, *words, "--run-name", "with", "--profile")
    figures, step = ["loss", "grad_norm", "lr"], f"checkpoints/step-{VERDICT_STEPS_MIN}"
    assert steps(tmp_path / "runs/with")[figures].equals(steps(tmp_path / "runs/without")[figures])
    assert_same_state(tmp_path / "runs/with" / step, tmp_path / "runs/without" / step)
    assert "verdict" not in without
    assert not (tmp_path / "runs/without/verdict.json").exists()
    assert "  verdict " in with_one.stdout
    # Beside other tests one rank may get less of the processors than the other.
    assert [line for line in with_one.stderr.splitlines() if " is slow: " not in line] == []
    verdict = read_verdict(tmp_path / "runs/with")
    assert [row["bound_by"] for row in rows(tmp_path / "summary.csv")] == ["", verdict.bound_by]
    assert len(verdict.ranks) == 2
    assert sum(verdict.shares.values()) == pytest.approx(1.0)
    # Each rank has its track, with its operations and its parts.
    events = json.loads((tmp_path / "runs/with/trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = {event["name"] for event in events}
    assert {"step", "micro-batch 0", "forward", "backward", "optimizer", "data"} <= names
    assert ("gather" if recipe == "fsdp" else "send") in names
    assert any(event["name"].startswith("aten::") for event in events)
    shown = ok("why", tmp_path / "runs/with").stdout
    assert shown.startswith(verdict.line())


def test_a_slow_reader_is_found_in_a_real_run(tmp_path):
    """Tests run beside each other, which the verdict may find worse than the reader."""
    words = "ddp --n-layer 1 --n-embd 32 --seq-len 32 --data synthetic --no-tensorboard --run-name run".split()
    worlds.ranks("world_faulty.py", 2, "slow_reader", *words, "--steps", VERDICT_STEPS_MIN, "--out", tmp_path)
    # Ranks that no launcher of ours has started leave the judging to the command.
    ok("why", tmp_path / "runs/run")
    (row,) = rows(tmp_path / "summary.csv")
    causes = json.loads((tmp_path / "runs/run/verdict.json").read_text())["causes"]
    (data,) = [cause for cause in causes if cause["name"] == "data-bound"]
    assert 1 - data["without_s"] / float(row["step_time_s_median"]) > 0.4
    assert row["bound_by"] in ("data-bound", "contended")


def test_a_short_run_has_no_verdict(tmp_path):
    ok("run", "single", "--steps", 3, "--n-layer", 1, "--n-embd", 32, "--out", tmp_path, "--run-name", "short")
    ended = worlds.gptscale("why", tmp_path / "runs/short")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "has no verdict" in ended.stderr
