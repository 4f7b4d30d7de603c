"""Checkpoints of a run: loaded alike on every rank, and saved when they are due."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptscale.common.checkpoint.background import BackgroundSave
from gptscale.common.checkpoint.folders import is_deepspeeds_own, set_aside_beyond
from gptscale.common.checkpoint.reader import Reader, agreed
from gptscale.common.checkpoint.replicas import ReplicaCheck
from gptscale.common.checkpoint.writer import save
from gptscale.common.engine import Engine
from gptscale.common.errors import StorageError, visible
from gptscale.common.measure.spikes import SpikeWatch
from gptscale.common.process.progress import progress
from gptscale.common.process.world import gather_objects
from gptscale.common.settings.run import changed_work
from gptscale.launchers.run.preflight import ReadyRun
from gptscale.results.record.files import warn

# A full disk may get free space while training goes on, so the first failed saves only warn.
SAVE_MISSES_MAX = 3


def resume(ready: ReadyRun, engine: Engine, folder: Path, restore: Callable[[Reader], None]) -> int:
    """Load the checkpoint that --resume means, the same on every rank, and return the step to go on from.

    Without --resume that is step 0. folder: that of the run's own checkpoints. Those beyond the step are set aside.
    restore: gets what the checkpoint has beside the engine's state.
    """
    is_main = ready.run.world.is_main
    if ready.run.config.resume is None:
        return 0
    # Ranks that look at another moment, or at another disk, must not do otherwise than rank 0.
    source = gather_objects(ready.resume)[0]
    if source is None:
        if is_main:
            print(f"nothing to resume in {folder}, the run begins at step 0", flush=True)
        return 0
    if is_deepspeeds_own(source):
        from gptscale.common.engines.zero.optimizer import load_own

        step = load_own(engine, source)
    else:
        reader = agreed(source, ready.check_same_work, is_main=is_main)
        reader.load_into(engine)
        restore(reader)
        step = reader.step
        if is_main:
            origin = f"{reader.manifest.get('recipe')} on {reader.manifest.get('world_size')}"
            changes = changed_work(reader.manifest["workload"], ready.work)
            lines = [f"resumed from {reader.path}, saved by {origin}", *changes]
            # Whoever wrote the checkpoint chose these texts.
            print("\n".join(map(visible, lines)), flush=True)
    if is_main:
        set_aside_beyond(folder, step)
    return step


class Saver:
    """The saving of checkpoints when they are due.

    Replicas are compared before each save, or as `--check-replicas` asks. If they differ, nothing is saved.
    before: called before a save, to put rows up to the step on disk, so that a resumed CSV has no gap.
    spikes: whose statistics are part of a checkpoint.
    A disk that is full now and then costs a checkpoint, not the run.
    With --save-async a save goes on behind the next steps. The last one, after SIGTERM too, is waited for.
    """

    def __init__(
        self, ready: ReadyRun, engine: Engine, folder: Path, before: Callable[[], None], spikes: SpikeWatch
    ) -> None:
        self.ready, self.engine, self.folder, self.before, self.spikes = ready, engine, folder, before, spikes
        self.every = ready.run.config.save_every
        self.check_replicas = ReplicaCheck(engine)
        self.misses = 0
        self.background = BackgroundSave()

    def __call__(self, step: int, last: bool) -> None:
        run = self.ready.run
        every, check_every = self.every, run.config.check_replicas
        due = bool(every and step % every == 0) or (last and bool(every or run.config.save_last))
        if self.background.under_way and (due or last or self.background.is_done()):
            progress.at("saving")
            self._attempt(self.background.finish)
        check_due = check_every != 0 and (due or bool(check_every and step % check_every == 0))
        if not (due or check_due):
            return
        progress.at("saving")
        if check_due:
            self.check_replicas(step)
        if not due:
            return
        self.before()
        facts = {"recipe": run.recipe, "world_size": run.world.world_size, "workload": self.ready.work}
        facts |= self.facts(step)
        if run.config.save_async and not last:
            self.background.begin(self.engine, self.folder, step, facts, keep=run.config.keep_checkpoints)
        else:
            keep = run.config.keep_checkpoints
            self._attempt(lambda: save(self.engine, self.folder, step, facts, keep=keep), last=last)

    def facts(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint says of the run beside its work."""
        run = self.ready.run
        tokens = step * run.tokens_per_step
        return {"dp_size": run.batch.dp_size, "tokens": tokens, "recent_steps": self.spikes.recent()}

    def wait(self) -> None:
        """Wait for the save under way, which the end of the run is not to lose."""
        if self.background.under_way:
            with suppress(StorageError):
                self.background.finish()

    def _attempt(self, finish: Callable[[], object], *, last: bool = False) -> None:
        """Finish a save, and raise its StorageError only if it was the last one, or too many have failed."""
        try:
            finish()
            self.misses = 0
        except StorageError as error:
            self.misses += 1
            if last or self.misses >= SAVE_MISSES_MAX:
                raise
            if self.ready.run.world.is_main:
                warn(f"{error} (missed {self.misses} of {SAVE_MISSES_MAX})")
