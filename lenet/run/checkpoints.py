"""Checkpoints of vision runs: when they are due, what they hold beside the engine's state, and the space that they take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

from gptscale.common.checkpoint.manifest import damaged
from gptscale.common.checkpoint.reader import Reader
from gptscale.common.checkpoint.space import EVENT_BYTES, OTHER_BYTES, ROW_BYTES, check_free
from gptscale.common.measure.spikes import SpikeWatch
from gptscale.launchers.run.checkpoints import Saver
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import EarlierProgress, VisionRecorder


class VisionSaver(Saver):
    """Saves a checkpoint every `save_every` epochs, at the end, and when the run is asked to stop."""

    def __init__(self, plan: VisionPlan, engine: VisionEngine, recorder: VisionRecorder, folder: Path) -> None:
        super().__init__(cast(Any, plan), engine, folder, recorder.sync, SpikeWatch())
        self.every, self.past = plan.config.save_every * plan.batch_order.steps_per_epoch, recorder.past

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint says of the run beside its work."""
        return {"past": dataclasses.asdict(self.past)}


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


def earlier_progress(reader: Reader) -> EarlierProgress:
    """Return the totals of the steps before a checkpoint, or raise CheckpointError if it has none."""
    try:
        return EarlierProgress(**reader.manifest["past"])
    except (KeyError, TypeError) as error:
        raise damaged(reader.path, "manifest.json", f"has no valid 'past' ({error})") from None
