"""Checkpoints of vision runs: saved when they are due, and loaded alike on every rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gptscale.common.checkpoint.reader import agreed
from gptscale.common.checkpoint.writer import save
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import VisionPlan, check_same_work
from gptscale.lenet.run.recorder import EarlierProgress, VisionRecorder


class VisionSaver:
    """Saves when it is due: every `save_every` epochs, at the end, and when the run is asked to stop."""

    def __init__(self, plan: VisionPlan, engine: VisionEngine, recorder: VisionRecorder, folder: Path) -> None:
        self.plan, self.engine, self.recorder, self.folder = plan, engine, recorder, folder

    def __call__(self, step: int, epochs: int) -> None:
        """After 1-based `step`. epochs: how many are complete, -1 before stopping within one."""
        every = self.plan.config.save_every
        if not every or (epochs >= 0 and epochs % every and step != self.plan.steps):
            return
        self.recorder.sync()  # rows up to this step reach the disk first, so that a resumed CSV has no gap
        facts = {
            "recipe": "lenet",
            "world_size": self.plan.world.world_size,
            "workload": self.plan.work,
            "past": dataclasses.asdict(self.recorder.past),
        }
        engine: Any = self.engine  # has what the writer asks of an Engine: state and counters
        save(engine, self.folder, step, facts, keep=self.plan.config.keep_checkpoints)


def resume(plan: VisionPlan, engine: VisionEngine) -> tuple[int, EarlierProgress]:
    """Load the checkpoint that --resume means, the same on every rank; the step to go on from, and what is known of the past."""
    if plan.resume is None:
        return 0, EarlierProgress()
    reader = agreed(plan.resume, lambda found: check_same_work(found, plan), is_main=plan.world.is_main)
    state: Any = engine
    reader.load_into(state)
    if plan.world.is_main:
        print(f"resumed from {reader.path}", flush=True)
    return reader.step, EarlierProgress(**reader.manifest["past"])
