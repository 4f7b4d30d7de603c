"""A run that has taken all its steps and is started again: it is done, and gets the row that a kill has kept from it."""

from __future__ import annotations

import csv
from contextlib import suppress
from pathlib import Path

from gptscale.common.checkpoint.reader import newest_readable
from gptscale.common.errors import CheckpointError
from gptscale.launchers.run.preflight import ReadyRun
from gptscale.results.columns import SUMMARY
from gptscale.results.record.run_folder import has_its_row, leave_row, read_json, run_directory
from gptscale.results.record.step_log import totals


def is_finished(ready: ReadyRun, folder: Path) -> bool:
    """Return whether --resume finds all steps of a run taken and saved, and say so. Every rank gives the same answer.

    If the run was killed between its last save and its row, rank 0 writes the row from what is there.
    """
    config, is_main = ready.run.config, ready.run.world.is_main
    has_row = has_its_row(folder, config.steps)
    if config.resume == "auto" and has_row:
        if is_main:
            said = f"its {config.steps} steps and its row are in {folder.parents[1]}"
            print(f"run {folder.name} is done: {said}", flush=True)
        return True
    if config.resume not in ("auto", "newest") or ready.resume is None or (is_main and has_row):
        return False
    newest, at_start = newest_readable(ready.resume), read_json(folder / "run.json")
    if newest is None or newest.step != config.steps or "identity" not in at_start:
        return False
    try:
        newest.verify()
    except CheckpointError:
        return False
    if is_main:
        with run_directory(config.out, folder.name, resumes=True):
            row = {**at_start["identity"], "status": "ok", "error": ""}
            with suppress(OSError, csv.Error):
                row["loss_first"], row["loss_last"], row["train_time_s"] = totals(folder / "steps.csv")
            row |= read_json(folder / "status.json").get("row", {})
            leave_row(SUMMARY, folder, row, config.steps)
        print(f"run {folder.name} is done: it was killed after its last step, and its row is written now", flush=True)
    return True
