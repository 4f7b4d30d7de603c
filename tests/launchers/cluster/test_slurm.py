"""Runs on a real Slurm cluster: the same figures as on one machine."""

import json
import re
import sys
from pathlib import Path

import pytest
from machines import held, wait_until_held
from slurm_jobs import TINY, log_of, steps, submit
from worlds import ok, rows

from gptscale.launchers.cli import main

pytestmark = pytest.mark.slow

WORK = [*TINY, "--steps", 50, "--out"]
# One run with the traces for a verdict, which come after the steps, is enough.
PLAIN = "--no-verdict"
# A sweep hands no option of a single recipe on.
SUBMITTED = {"ddp": [], "hybrid_3d": ["--tp-size", 2, PLAIN]}
SWEPT = ["fsdp", "zero2", "pipeline"]


def submit_sweep(capsys, *words):
    """Submit a sweep, and return the number of its array and of the job that compares its runs."""
    assert main([str(word) for word in ("sweep", "--submit", *words)]) == 0, capsys.readouterr().err
    return re.search(r"follow +squeue --jobs (\d+),(\d+)", capsys.readouterr().out).groups()


def test_two_nodes_compute_what_one_machine_computes(slurm, capsys, monkeypatch, tmp_path):
    """Two recipes by jobs of their own, the others by a sweep, of which one task fails and leaves its row all the same."""
    recipes = ",".join(["ddp", "single", *SWEPT])
    words = ["--nodes", 2, *WORK, "out", "--time", 10]
    for variable, value in held(tmp_path, "/s-ddp-0/steps.csv").items():
        monkeypatch.setenv(variable, value)
    array, comparison = submit_sweep(capsys, "--recipes", recipes, *words, PLAIN, "--run-name", "s")
    jobs = {
        recipe: submit(capsys, recipe, *words, *own, "--run-name", f"own-{recipe}") for recipe, own in SUBMITTED.items()
    }
    # The run has begun, and its 50 steps are not over.
    wait_until_held(*(slurm.machines[name] for name in slurm.nodes)).kill()
    assert Path("out/runs/s-ddp-0/run.json").exists()
    for recipe in (*SUBMITTED, *SWEPT):
        ok("run", recipe, "--nproc", 2, *WORK, "one", *SUBMITTED.get(recipe, [PLAIN]))
    assert slurm.wait_for_end(comparison)["JobState"] == "COMPLETED"
    for job in jobs.values():
        assert slurm.wait_for_end(job)["JobState"] == "COMPLETED", log_of(job)
    assert slurm.job(f"{array}_0")["JobState"] == "FAILED"

    runs = {recipe: f"own-{recipe}" for recipe in SUBMITTED} | {recipe: f"s-{recipe}-0" for recipe in SWEPT}
    for recipe, run in runs.items():
        (alone,) = Path("one", "runs").glob(f"{recipe}-*")
        for ours, theirs in zip(steps(run), steps(alone.name, "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        nodes = json.loads(Path("out", "runs", run, "run.json").read_text())["nodes"]
        assert [node["ranks"] for node in nodes] == [[0], [1]]
        assert {node["host"] for node in nodes} < set(slurm.nodes)
    summary = rows(Path("out/summary.csv"))
    found = sorted((row["run_id"], row["recipe"], row["status"], row["world_size"]) for row in summary)
    ended = [(run, recipe, "ok", "2") for recipe, run in runs.items()]
    assert found == sorted([*ended, ("s-single-0", "single", "ok", "1"), ("s-ddp-0", "ddp", "failed", "2")])
    text = Path("out/comparison.md").read_text()
    assert all(recipe in text for recipe in (*SWEPT, "single", "failed"))


def test_doctor_compares_the_nodes_of_an_allocation(slurm):
    words = [sys.executable, "-m", "gptscale.launchers.cli", "doctor", "--nodes", "--out", "out"]
    said = slurm.ok("salloc", "--nodes", "2", *words)
    assert "differs" not in said
    assert len(re.findall(r"n\d .*torch.*eth0", said)) == 2
    assert "all-reduce of 16 MiB over 2 nodes" in said
    assert list(Path("out").iterdir()) == []
