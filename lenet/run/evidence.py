"""What limits a vision run's speed: the evidence after its last step, for whoever judges it."""

from __future__ import annotations

from functools import partial

from gptscale.common.engine import Batch
from gptscale.common.measure.evidence import SHORT, RankEvidence, evidence_of
from gptscale.common.measure.speed import synchronize
from gptscale.common.process.progress import progress
from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.loop import VisionBatches
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import VisionRecorder


def vision_evidence(plan: VisionPlan, engine: VisionEngine, recorder: VisionRecorder) -> RankEvidence | None:
    """Take a few steps more at a rate of 0, and return what they show, or None for a run that gets no verdict.

    Everything is tested and saved before, and their state is thrown away.
    """
    if not plan.config.verdict or recorder.n_steps < VERDICT_STEPS_MIN:
        return None
    data, first = VisionBatches(plan), plan.planned_steps

    def step(i: int, part: int = 1) -> None:
        progress.at("data")
        batch = data.get(first + i)
        n = max(1, len(batch.targets) // part)
        loss = engine.train_step(Batch(batch.step, batch.inputs[:n], batch.targets[:n]), 0.0).loss
        progress.at("record")
        loss.item()
        synchronize(plan.world.device)

    device = plan.world.device
    short_step = partial(step, part=SHORT) if device.type == "cpu" else None
    return evidence_of(plan.world.rank, step, device, recorder.data_waits_s, short_step=short_step)
