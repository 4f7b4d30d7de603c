"""Checkpoints of a run: loaded alike on every rank, and saved when they are due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gptscale.common.checkpoint.reader import agreed, is_deepspeeds_own
from gptscale.common.checkpoint.writer import save
from gptscale.common.engine import Engine
from gptscale.common.errors import StorageError
from gptscale.common.settings.run import workload
from gptscale.launchers.run.preflight import Plan, check_same_work
from gptscale.results.record.files import warn

# A full disk may get free space while training goes on, so the first failed saves only warn.
SAVE_MISSES_MAX = 3


def resume(plan: Plan, engine: Engine) -> int:
    """Load the checkpoint that --resume means, the same on every rank, and return the step to go on from.

    Without --resume that is step 0.
    """
    if plan.resume is None:
        return 0
    if is_deepspeeds_own(plan.resume):
        from gptscale.common.engines.zero.optimizer import load_own

        return load_own(engine, plan.resume)
    reader = agreed(plan.resume, lambda reader: check_same_work(reader, plan), is_main=plan.run.world.is_main)
    reader.load_into(engine)
    if plan.run.world.is_main:
        origin = f"{reader.manifest['recipe']} on {reader.manifest['world_size']}"
        print(f"resumed from {reader.path}, saved by {origin}", flush=True)
    return reader.step


class Saver:
    """The saving of checkpoints when they are due.

    before: called first, to put rows up to the step on disk, so that a resumed CSV has no gap.
    A disk that is full now and then costs a checkpoint, not the run.
    """

    def __init__(self, plan: Plan, engine: Engine, folder: Path, before: Callable[[], None]) -> None:
        self.plan, self.engine, self.folder, self.before = plan, engine, folder, before
        self.misses = 0

    def __call__(self, step: int, last: bool) -> None:
        run = self.plan.run
        every = run.config.save_every
        if not ((every and step % every == 0) or (last and (every or run.config.save_last))):
            return
        self.before()
        facts = {
            "recipe": run.recipe,
            "world_size": run.world.world_size,
            "dp_size": run.batch.dp_size,
            "tokens": step * run.tokens_per_step,
            "workload": workload(run, self.plan.fingerprint),
        }
        try:
            save(self.engine, self.folder, step, facts, keep=run.config.keep_checkpoints)
            self.misses = 0
        except StorageError as error:
            self.misses += 1
            if last or self.misses >= SAVE_MISSES_MAX:
                raise
            if run.world.is_main:
                warn(f"{error} (missed {self.misses} of {SAVE_MISSES_MAX})")
