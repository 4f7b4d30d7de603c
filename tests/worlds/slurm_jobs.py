"""What tests do with jobs on a cluster of Slurm (machines.py): submit one, and read what its runs left."""

import re
from pathlib import Path

import table_rows

from gptscale.launchers.cli import main

TINY = ["--data", "synthetic", "--n-layer", 2, "--n-embd", 32, "--n-head", 2, "--seq-len", 16, "--vocab-size", 256,
        "--no-tensorboard", "--log-every", 20]  # fmt: skip


def submit(capsys, *words):
    """Submit a run and return the number of its job."""
    assert main([str(word) for word in ("submit", *words)]) == 0, capsys.readouterr().err
    return re.search(r"^job +(\d+)", capsys.readouterr().out, re.MULTILINE)[1]


def log_of(job, out="out"):
    """Return what a job and its ranks have said so far."""
    (log,) = Path(out, "jobs").glob(f"*-{job}.log")
    return log.read_text()


def steps(name, out="out"):
    """Return the columns of a run's steps that every start of it must repeat."""
    found = table_rows.rows(Path(out, "runs", name, "steps.csv"))
    return [(int(row["step"]), float(row["loss"]), float(row["grad_norm"])) for row in found]


def rows(name, out="out"):
    """Return how each start of a run ended, with its ranks and its accumulation."""
    mine = [row for row in table_rows.rows(Path(out, "summary.csv")) if row["run_id"] == name]
    return [(row["status"], int(row["world_size"]), int(row["grad_accum_steps"])) for row in mine]
