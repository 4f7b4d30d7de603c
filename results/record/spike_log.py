"""What a run does about spikes: a line on the terminal and in spikes.csv, or its end."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from gptscale.common.errors import NumericError
from gptscale.common.measure.spikes import Spike, SpikeWatch
from gptscale.common.settings.run import Run
from gptscale.results.record.files import warn
from gptscale.results.record.step_log import StepLog

SPIKE_COLUMNS = ("step", "figure", "value", "mean", "deviations", "skipped", "sequences")


class SpikeLog:
    """The spikes of a run, which `watch` finds, and their file, which rank 0 makes at the first of them.

    sequences(step, rank): which sequences a rank had in 0-based `step`. start_step: rows beyond it are set aside.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        watch: SpikeWatch,
        sequences: Callable[[int, int], tuple[int, ...]],
        start_step: int,
    ) -> None:
        self.run, self.path, self.watch, self.sequences = run, folder / "spikes.csv", watch, sequences
        self._start_step = start_step
        self._log: StepLog | None = self._open() if run.world.is_main and self.path.exists() else None

    def _open(self) -> StepLog:
        return StepLog(self.path, SPIKE_COLUMNS, after_step=self._start_step)

    def step(self, step: int, loss: float, norm: float) -> None:
        """Look at a finished step. Every rank does, and with `--on-spike stop` all raise NumericError for a spike."""
        spike = self.watch.verdict(loss, norm)
        if spike is None:
            return
        policy = self.run.config.on_spike
        # The batch is named by the indices of its sequences, data rank by data rank.
        batch = " ".join(str(i) for rank in range(self.run.batch.dp_size) for i in self.sequences(step - 1, rank))
        if self.run.world.is_main:
            self._write(step, spike, policy == "skip", batch)
        if policy == "stop":
            fix = "look at that batch, or go on with --resume auto --on-spike skip"
            raise NumericError(str(spike), f"at step {step} (sequences {batch[:200]})", fix)
        if self.run.world.is_main:
            outcome = "the step was skipped" if policy == "skip" else "the step was applied (--on-spike warn)"
            warn(f"{spike}, at step {step} (sequences {batch[:200]}), {outcome}")

    def _write(self, step: int, spike: Spike, skipped: bool, batch: str) -> None:
        self._log = self._log or self._open()
        self._log.append({"step": step, **spike._asdict(), "skipped": skipped, "sequences": batch})
        self._log.flush()

    def skipped(self) -> int | None:
        """Return how many steps of the whole run were skipped, None if this run skips none."""
        if self.run.config.on_spike != "skip":
            return None
        if not self.path.exists():
            return 0
        with self.path.open(newline="") as file:
            return len([row for row in csv.DictReader(file) if row["skipped"] == "true"])

    def close(self) -> None:
        if self._log:
            self._log.close()
