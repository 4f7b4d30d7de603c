"""Runs on a real Slurm cluster: the same figures as on one machine."""

import csv
import json
import re
import sys
from pathlib import Path

import pytest
from slurm_jobs import TINY, log_of, steps, submit
from worlds import ok

from gptscale.launchers.cli import main

pytestmark = pytest.mark.slow

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
        assert [node["ranks"] for node in nodes] == [[0], [1]]
        assert {node["host"] for node in nodes} < set(slurm.nodes)
    with Path("out", "summary.csv").open() as file:
        assert sorted(row["recipe"] for row in csv.DictReader(file)) == sorted(RECIPES)


def test_doctor_compares_the_nodes_of_an_allocation(slurm):
    words = [sys.executable, "-m", "gptscale.launchers.cli", "doctor", "--nodes", "--out", "out"]
    said = slurm.ok("salloc", "--nodes", "2", *words)
    assert "differs" not in said
    assert len(re.findall(r"n\d .*torch.*eth0", said)) == 2
    assert "all-reduce of 16 MiB over 2 nodes" in said
    assert list(Path("out").iterdir()) == []


def test_a_sweep_is_an_array_whose_rows_all_arrive_and_are_compared(slurm, capsys):
    words = [
        "--nodes",
        2,
        "--recipes",
        "single,ddp,fsdp",
        *TINY,
        "--steps",
        3,
        "--out",
        "out",
        "--run-name",
        "s",
        "--time",
        9,
    ]
    assert main([str(word) for word in ("sweep", "--submit", *words)]) == 0
    said = capsys.readouterr().out
    _, after = re.search(r"follow +squeue --jobs (\d+),(\d+)", said).groups()
    assert slurm.wait_for_end(after)["JobState"] == "COMPLETED", said
    with Path("out/summary.csv").open() as file:
        rows = {row["run_id"]: (row["status"], row["world_size"]) for row in csv.DictReader(file)}
    assert rows == {"s-single-0": ("ok", "1"), "s-ddp-0": ("ok", "2"), "s-fsdp-0": ("ok", "2")}
    assert "fsdp" in Path("out/comparison.md").read_text()
