"""The row of a run that was killed between its last save and its row."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from gptscale.common.checkpoint.reader import newest_readable
from gptscale.common.errors import CheckpointError
from gptscale.launchers.run.preflight import ReadyRun
from gptscale.launchers.run.record import RunRecord
from gptscale.results.columns import SUMMARY
from gptscale.results.record.files import append_row, warn, write_json
from gptscale.results.record.launch_with_row import rows_of
from gptscale.results.record.recorder import written_before
from gptscale.results.record.run_folder import end_of, of_this_start, read_json, run_directory


def leave_missing_row(ready: ReadyRun, folder: Path) -> bool:
    """Return whether --resume finds all steps of a run saved but not its row, and write the row from what is there.

    Every rank answers, and rank 0 writes.
    """
    config, world = ready.run.config, ready.run.world
    if config.resume not in ("auto", "newest") or ready.resume is None:
        return False
    newest = newest_readable(ready.resume)
    if newest is None or newest.step != config.steps:
        return False
    try:
        newest.verify()
    except CheckpointError:
        # It is set aside when the run starts, and the one before continues the run.
        return False
    if world.is_main:
        with run_directory(config.out, folder.name, resumes=True):
            end = read_json(folder / "status.json")
            row = _row(ready, folder, end)
            if not rows_of(config.out / "summary.csv", folder.name, ok_since=row["timestamp"]):
                append_row(SUMMARY, config.out, row)
            write_json(folder / "status.json", of_this_start(end_of(row, newest.step)))
        warn(
            f"{folder.name} was ended after its last save, at step {newest.step}: its row is there now, and it is done"
        )
    return True


def _row(ready: ReadyRun, folder: Path, end: dict[str, Any]) -> dict[str, Any]:
    """Return what the end of the steps left of the row, or else what run.json and steps.csv say."""
    if end.get("status") == "ok" and end.get("step") == ready.run.config.steps and isinstance(end.get("row"), dict):
        return dict(end["row"])
    row = read_json(folder / "run.json").get("identity") or RunRecord(ready, folder.name).identity()
    row |= {"status": "ok", "error": ""}
    with suppress(OSError):
        first, last, seconds = written_before(folder / "steps.csv")
        row |= {"loss_first": first, "loss_last": last, "train_time_s": seconds}
    return row
