"""Starting the processes of a run so that the run never ends without a row in its summary."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

from gptscale.common.errors import INTERRUPTED_EXIT_STATUS, PeerError, StorageError
from gptscale.common.process.program import Program
from gptscale.common.process.ranks import launch
from gptscale.results.columns import RunTable
from gptscale.results.record.files import append_row, warn
from gptscale.results.record.run_folder import START, read_json


def launch_with_row(program: Program, nproc: int, folder: Path, table: RunTable, *, fork: bool) -> int:
    """Run `program` as `nproc` ranks, see to it that the run has its row, and return the exit status.

    folder: the run's folder. It is named as the run. Rank 0 writes run.json into it when it starts, and status.json when its
    steps are over and again after its row. Both name the start that they belong to, so that those of an earlier start, or of
    another run that has the folder, do not count. Ranks that all end with 0 before that have failed. A rank that dies after it
    changes nothing.
    table: gets the row of a start that began and left none.
    fork: whether the ranks may be forked from a warm parent, which ranks that use CUDA may not.
    """
    start, summary = uuid.uuid4().hex, folder.parents[1] / table.file
    before = rows_of(summary, folder.name)
    status = launch(program, nproc, environment={START: start}, fork=fork)
    at_end = read_json(folder / "status.json")
    has_ended = at_end.get("start") == start
    if status == 0 and not (has_ended and at_end.get("status") == "ok"):
        fix = "look for what ends the process in the code that it calls, such as os._exit"
        status = _say(PeerError("all ranks ended with status 0 before the run was done", f"in {folder}", fix))
    try:
        if status and leave_lost_row(folder, start, status, table, has_row=rows_of(summary, folder.name) != before):
            # Rows that the disk did not take are a fault all the same, and whoever pressed Ctrl-C wants nothing more.
            return status if status in (StorageError.exit_status, INTERRUPTED_EXIT_STATUS) else 0
    except StorageError as full:
        _say(full)
    return status


def leave_lost_row(folder: Path, start: str, status: int, table: RunTable, *, has_row: bool = False) -> bool:
    """Write the row of a start whose ranks ended with `status`, unless it has one, and return whether all its steps were done.

    A rank that is ended with its peers may have written the row and not the status. has_row: whether it has. A start that
    never began gets none. Raises StorageError if the disk does not take the row.
    """
    at_start, at_end = (read_json(folder / name) for name in ("run.json", "status.json"))
    if at_start.get("start") != start:
        return False
    error = f"ended with status {status} before it could leave its own row"
    row: dict[str, Any] = {**at_start["identity"], "status": "failed", "error": error}
    if at_end.get("start") == start:
        row, has_row = at_end.get("row", row), has_row or "row" not in at_end
    if not has_row:
        append_row(table, folder.parents[1], row)
    is_done = at_end.get("start") == start and at_end.get("status") == "ok"
    if is_done:
        warn(f"all {at_end.get('step')} steps of {folder.name} were done by then, so that the run is ok")
    return is_done


def rows_of(summary: Path, run_id: str) -> int:
    """Count the summary's rows of this run, which are as many as the times it ended."""
    try:
        with summary.open("rb") as lines:
            # run_id is the second column of every summary.
            return sum(line.split(b",", 2)[1:2] == [run_id.encode()] for line in lines)
    except OSError:
        return 0


def _say(error: PeerError | StorageError) -> int:
    print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
    return error.exit_status
