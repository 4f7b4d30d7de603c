"""Starting the processes of a run so that the run never ends without a row in its summary."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch


def launch_with_row(
    program: Program,
    nproc: int,
    folder: Path,
    summary: Path,
    append: Callable[[Path, Mapping[str, Any]], Any],
    *,
    fork: bool,
) -> int:
    """Run `program` as `nproc` ranks, see to it that the run has its row, and return the exit status.

    folder: the run's folder. It is named as the run, and the ranks write run.json into it when they start.
    append: writes a row to the summary. It is called if the ranks failed and left no row of this run in `summary`.
    fork: whether the ranks may be forked from a warm parent, which ranks that use CUDA may not.
    """
    before = rows_of(summary, folder.name)
    status = launch(program, nproc, fork=fork)
    if status and (folder / "run.json").exists() and rows_of(summary, folder.name) == before:
        append(summary.parent, failed_row(folder, f"ended with status {status} before it could leave its own row"))
    return status


def rows_of(summary: Path, run_id: str) -> int:
    """Count the summary's rows of this run, which are as many as the times it ended."""
    if not summary.exists():
        return 0
    with summary.open(newline="") as file:
        return sum(row["run_id"] == run_id for row in csv.DictReader(file))


def failed_row(folder: Path, error: str) -> dict[str, Any]:
    """Return the row of a run whose rank 0 was killed before it could write one, from the run.json of its start."""
    at_start = json.loads((folder / "run.json").read_bytes())
    return {**at_start["identity"], "status": "failed", "error": error}
