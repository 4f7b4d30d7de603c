"""From options to the finished processes of one vision run on this machine, and never a run without a row."""

from __future__ import annotations

import dataclasses
import sys

from gptscale.launchers.local import launch
from gptscale.launchers.record import failed_row
from gptscale.launchers.start import rows_of
from gptscale.lenet.config import VisionConfig, option_words
from gptscale.lenet.plan import make_plan, world_of
from gptscale.lenet.results import SUMMARY_NAME, append_summary
from gptscale.lenet.row import new_run_id


def start(config: VisionConfig, nproc: int) -> int:
    """Check, launch, wait; the run's exit status. A run whose rank 0 was killed gets its row from here."""
    make_plan(config, world_of(config, nproc))  # one line, before any process
    name = config.run_name or new_run_id(config.model)
    words = option_words(dataclasses.replace(config, run_name=name))
    summary, folder = config.out / SUMMARY_NAME, config.out / "runs" / name
    before = rows_of(summary, name)
    status = launch([sys.executable, "-u", "-m", "gptscale.lenet.train", *words], nproc)
    if status and (folder / "run.json").exists() and rows_of(summary, name) == before:
        append_summary(config.out, failed_row(folder, f"ended with status {status} before it could leave its own row"))
    return status
