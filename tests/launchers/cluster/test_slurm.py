"""Runs on a real Slurm cluster: the same figures as on one machine, and nothing is lost when a node goes."""

import csv
import json
import re
from pathlib import Path

import pytest
from worlds import ok

from gptscale.launchers.cli import main

pytestmark = pytest.mark.slow
TINY = ["--data", "synthetic", "--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--vocab-size", 256,
        "--no-tensorboard"]  # fmt: skip


def submit(capsys, *words):
    """Submit a run and return the number of its job."""
    assert main([str(word) for word in ("submit", *words)]) == 0, capsys.readouterr().err
    return re.search(r"^job +(\d+)", capsys.readouterr().out, re.MULTILINE)[1]


def log_of(job, out="out"):
    (log,) = Path(out, "jobs").glob(f"*-{job}.log")
    return log.read_text()


def steps(name, out="out"):
    """Return the columns of a run's steps that every start of it must repeat."""
    with Path(out, "runs", name, "steps.csv").open() as file:
        return [(int(row["step"]), float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file)]


RECIPES = {
    "ddp": [],
    "fsdp": [],
    "zero2": [],
    "pipeline": [],
    "hybrid_3d": ["--tp-size", 2],
}


def test_two_nodes_compute_what_one_machine_computes(slurm, capsys):
    jobs = {}
    for recipe, words in RECIPES.items():
        work = [*TINY, "--steps", 3, *words, "--out", "out"]
        jobs[recipe] = submit(capsys, recipe, "--nodes", 2, *work, "--run-name", recipe, "--time", 10)
    for recipe, words in RECIPES.items():
        ok("run", recipe, "--nproc", 2, *TINY, "--steps", 3, *words, "--out", "one")
    for recipe, job in jobs.items():
        ended = slurm.wait_for_end(job)
        assert ended["JobState"] == "COMPLETED", log_of(job)
        (own,) = Path("one", "runs").glob(f"{recipe}-*")
        for ours, theirs in zip(steps(recipe), steps(own.name, "one"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        nodes = json.loads(Path("out", "runs", recipe, "run.json").read_text())["nodes"]
        assert [(node["host"], node["ranks"]) for node in nodes] == [("n1", [0]), ("n2", [1])]
    with Path("out", "summary.csv").open() as file:
        assert sorted(row["recipe"] for row in csv.DictReader(file)) == sorted(RECIPES)
