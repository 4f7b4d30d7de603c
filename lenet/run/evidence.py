"""What limits a vision run's speed: the evidence after its last step, for whoever judges it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path

from gptscale.common.measure.evidence import (
    SHORT,
    RankEvidence,
    RunEvidence,
    RunFacts,
    evidence_of,
    judged_ranks,
    right_threads,
)
from gptscale.common.measure.speed import synchronize
from gptscale.common.process.progress import progress
from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.lenet.run.columns import SUMMARY_NAME
from gptscale.lenet.run.engine import VisionEngine
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import VisionRecorder
from gptscale.results.record.run_folder import leave_evidence


def vision_evidence(plan: VisionPlan, engine: VisionEngine, recorder: VisionRecorder) -> RankEvidence | None:
    """Take a few steps more at a rate of 0, and return what they show, or None for a run that gets no verdict.

    Everything is tested and saved before, and their state is thrown away.
    """
    if not plan.config.verdict or recorder.totals.steps < VERDICT_STEPS_MIN:
        return None
    loader = plan.loader()
    batches = chain.from_iterable(loader.epoch(epoch, 0) for epoch in count(plan.config.epochs))

    def step(i: int, part: int = 1) -> None:
        progress.at("data")
        images, labels = next(batches)
        n = max(1, len(labels) // part)
        loss = engine.train_step(plan.steps + i, images[:n], labels[:n], 0.0)
        progress.at("record")
        loss.item()
        synchronize(plan.world.device)

    device = plan.world.device
    short_step = partial(step, part=SHORT) if device.type == "cpu" else None
    return evidence_of(plan.world.rank, step, device, recorder.totals.loads_s, short_step=short_step)


def leave_vision_evidence(
    plan: VisionPlan,
    folder: Path,
    of_ranks: Sequence[RankEvidence | None],
    recorder: VisionRecorder,
    taken: float | None,
) -> None:
    """Write the evidence of all ranks for whoever judges the run, if each has some. taken: what others had of the machine."""
    config, totals = plan.config, recorder.totals
    ranks = [evidence for evidence in of_ranks if evidence is not None]
    times_s = [load + update for load, update in zip(totals.loads_s, totals.updates_s, strict=True)]
    if not times_s or not ranks or len(ranks) < len(of_ranks):
        return
    facts = RunFacts(
        "",
        cuda=plan.world.device.type == "cuda",
        micro_batch_size=config.batch_size,
        right_threads=right_threads(),
        slow_loader=config.loader == "dataloader",
    )
    leave_evidence(folder, RunEvidence(SUMMARY_NAME, facts, judged_ranks(ranks), times_s, taken))
