"""From options to the finished processes of one vision run on this machine, and never a run without a row."""

from __future__ import annotations

import dataclasses
import sys

from gptscale.lenet.run.columns import SUMMARY_NAME, append_summary
from gptscale.lenet.run.config import VisionConfig, option_words
from gptscale.lenet.run.preflight import local_world, make_plan
from gptscale.lenet.run.record import new_run_id
from gptscale.results.record.launch_with_row import launch_with_row


def start(config: VisionConfig, nproc: int) -> int:
    """Check, launch, wait; the run's exit status. A run whose rank 0 was killed gets its row from here."""
    make_plan(config, local_world(config, nproc))  # one line, before any process
    name = config.run_name or new_run_id(config.model)
    words = option_words(dataclasses.replace(config, run_name=name))
    command = [sys.executable, "-u", "-m", "gptscale.lenet.run.worker", *words]
    return launch_with_row(command, nproc, config.out / "runs" / name, config.out / SUMMARY_NAME, append_summary)
