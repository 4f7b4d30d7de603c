"""Runs on a real Slurm cluster: the same figures as on one machine, and nothing is lost when a node goes."""

import csv
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from machines import connect, wait_for
from worlds import ok

from gptscale.common.checkpoint.reader import Reader
from gptscale.launchers.cli import main

pytestmark = pytest.mark.slow
TINY = ["--data", "synthetic", "--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--vocab-size", 256,
        "--no-tensorboard", "--log-every", 20]  # fmt: skip


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


LONG = [*TINY, "--steps", 600, "--save-every", 100, "--out", "out"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run of 600 steps on two processes that nobody stopped."""
    out = tmp_path_factory.mktemp("unbroken")
    ok("run", "ddp", "--nproc", 2, *LONG[:-1], out, "--run-name", "r")
    return out


def started(slurm, capsys, *words):
    """Submit the run of 600 steps on two nodes, wait until it has done a hundred, and return the number of its job."""
    wait_for(lambda: slurm.states() == ["idle", "idle"], "the nodes")
    job = submit(capsys, "ddp", "--nodes", 2, *LONG, "--run-name", "r", *words)
    file = Path("out/runs/r/steps.csv")
    wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") > 100, "a hundred steps")
    return job


def start_again(slurm, job, *changes):
    """Spare a job most of the two minutes in the queue, in which its credentials of the earlier start are refused."""
    wait_for(lambda: slurm.job(job)["JobState"] == "PENDING" and slurm.states()[0] == "idle", "the queue")
    slurm.ok("scontrol", "update", f"JobId={job}", "StartTime=now+4", *changes)


def rows():
    with Path("out/summary.csv").open() as file:
        return [(row["status"], int(row["world_size"]), int(row["grad_accum_steps"])) for row in csv.DictReader(file)]


def assert_same_bits(unbroken):
    assert steps("r") == steps("r", unbroken)
    ours, theirs = (Reader(out / "runs/r/checkpoints/step-600") for out in (Path("out"), unbroken))
    assert sorted(ours.names()) == sorted(theirs.names())
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.names())


def test_a_preempted_job_goes_on_by_itself_with_the_same_bits(slurm, capsys, unbroken):
    job = started(slurm, capsys)
    slurm.ok("scancel", "--batch", "--signal=TERM", job)
    start_again(slurm, job)
    ended = slurm.wait_for_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log_of(job)
    assert "status 75: back into the queue" in log_of(job)
    assert rows() == [("interrupted", 2, 1), ("ok", 2, 1)]
    assert_same_bits(unbroken)


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(slurm, capsys):
    job = started(slurm, capsys)
    slurm.ok("scancel", job)
    assert slurm.wait_for_end(job)["JobState"] == "CANCELLED", log_of(job)
    assert "back into the queue" not in log_of(job)
    assert rows() == [("interrupted", 2, 1)]


def test_a_node_that_dies_is_done_without(slurm, capsys, unbroken):
    job = started(slurm, capsys, "--min-nodes", 1)
    slurm.machines["n2"].die()
    began = time.monotonic()
    wait_for(lambda: Path("out/summary.csv").exists(), "the end of the other ranks")
    assert time.monotonic() - began < 10
    start_again(slurm, job)
    ended = slurm.wait_for_end(job)
    assert ended["JobState"] == "COMPLETED", log_of(job)
    assert rows() == [("failed", 2, 1), ("ok", 1, 2)]
    for ours, theirs in zip(steps("r"), steps("r", unbroken), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    slurm.machines["n2"].start()
    connect(slurm.login, slurm.machines["n2"])
    slurm.start_slurmd("n2")
    wait_for(lambda: slurm.states() == ["idle", "idle"], "the node")


def test_doctor_compares_the_nodes_of_an_allocation(slurm):
    words = [sys.executable, "-m", "gptscale.launchers.cli", "doctor", "--nodes", "--out", "out"]
    said = slurm.ok("salloc", "--nodes", "2", *words)
    assert "differs" not in said
    assert re.search(r"n1 .*torch.*eth0", said)
    assert re.search(r"n2 .*torch.*eth0", said)
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
