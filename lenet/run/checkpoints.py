"""Checkpoints of vision runs: saving them when they are due, and resuming from the same one on every rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gptscale.common.checkpoint.folders import set_aside_beyond
from gptscale.common.checkpoint.manifest import damaged
from gptscale.common.checkpoint.reader import agreed
from gptscale.common.checkpoint.space import EVENT_BYTES, OTHER_BYTES, ROW_BYTES, check_free
from gptscale.common.checkpoint.writer import save
from gptscale.common.process.world import gather_objects
from gptscale.common.settings.run import changed_work
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import VisionPlan, check_same_work
from gptscale.lenet.run.recorder import EarlierProgress, VisionRecorder


class VisionSaver:
    """Saves a checkpoint every `save_every` epochs, at the end, and when the run is asked to stop."""

    def __init__(self, plan: VisionPlan, engine: VisionEngine, recorder: VisionRecorder, folder: Path) -> None:
        self.plan, self.engine, self.recorder, self.folder = plan, engine, recorder, folder

    def __call__(self, step: int, complete_epochs: int | None) -> None:
        """Save after 1-based `step` if a checkpoint is due.

        complete_epochs: None before the run stops on request, when a checkpoint is always due.
        """
        every = self.plan.config.save_every
        if not every:
            return
        if complete_epochs is not None and complete_epochs % every and step != self.plan.steps:
            return
        # Rows up to this step reach the disk first, so that a resumed CSV has no gap.
        self.recorder.sync()
        facts = {
            "recipe": "lenet",
            "world_size": self.plan.world.world_size,
            "workload": self.plan.work,
            "past": dataclasses.asdict(self.recorder.past),
        }
        # A vision engine has what the writer asks of an Engine: state and counters.
        engine: Any = self.engine
        save(engine, self.folder, step, facts, keep=self.plan.config.keep_checkpoints)


def check_space(plan: VisionPlan, engine: VisionEngine, folder: Path) -> None:
    """Raise StorageError if the checkpoints and logs of a run cannot fit on the disk of its `folder`."""
    config = plan.config
    epochs = -(-plan.steps // plan.batch_order.steps_per_epoch)
    check_free(
        folder,
        saves=-(-epochs // config.save_every) if config.save_every else 0,
        keep=config.keep_checkpoints,
        checkpoint_bytes=sum(shard.tensor.nbytes for shard in engine.state()),
        log_bytes=OTHER_BYTES + plan.steps * (ROW_BYTES + EVENT_BYTES * config.tensorboard),
    )


def resume(plan: VisionPlan, engine: VisionEngine, folder: Path) -> tuple[int, EarlierProgress]:
    """Load the checkpoint that --resume means, and return the step to continue from and the totals of the earlier steps.

    folder: that of the run's own checkpoints. Those beyond the step are set aside.
    """
    if plan.config.resume is None:
        return 0, EarlierProgress()
    # Ranks that look at another moment, or at another disk, must not do otherwise than rank 0.
    source = gather_objects(plan.resume)[0]
    if source is None:
        if plan.world.is_main:
            print(f"nothing to resume in {folder}, the run begins at step 0", flush=True)
        return 0, EarlierProgress()
    reader = agreed(source, lambda reader: check_same_work(reader, plan), is_main=plan.world.is_main)
    state: Any = engine
    reader.load_into(state)
    try:
        past = EarlierProgress(**reader.manifest["past"])
    except (KeyError, TypeError) as error:
        raise damaged(reader.path, "manifest.json", f"has no valid 'past' ({error})") from None
    if plan.world.is_main:
        changes = changed_work(reader.manifest["workload"], plan.work)
        print("\n".join([f"resumed from {reader.path}", *changes]), flush=True)
        set_aside_beyond(folder, reader.step)
    return reader.step, past
