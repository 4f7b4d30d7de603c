"""The recorder of a vision run: a row per step and per epoch, TensorBoard, and lines on standard output."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gptscale.common.errors import NumericError
from gptscale.common.measure.contention import MachineClock, MachineTime
from gptscale.common.measure.speed import reset_peak_memory, synchronize
from gptscale.lenet.run.columns import EPOCH_COLUMNS, STEP_COLUMNS, WARMUP_STEPS, fractions
from gptscale.lenet.run.engine import Score
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.results.record.board import Board
from gptscale.results.record.console import Bar
from gptscale.results.record.step_log import StepLog, close_logs
from gptscale.results.record.wandb_board import WandbBoard


class StepOnDevice(NamedTuple):
    """A step whose loss is still on the device.

    skipped: 1 if the fp16 gradients overflowed, None without a loss scale.
    """

    step: int
    epoch: int
    lr: float
    loss: Tensor
    load_s: float
    update_s: float
    skipped: Tensor | None = None


@dataclass
class EarlierProgress:
    """The totals of the steps before this process, which a continuing run needs.

    epoch_loss_sum: sum of the losses of the epoch so far, over epoch_steps. skipped_steps: steps that overflowed.
    """

    epoch_loss_sum: float = 0.0
    epoch_steps: int = 0
    loss_first: float | None = None
    best_accuracy: float = 0.0
    skipped_steps: int = 0


@dataclass
class ProcessTotals:
    """Sums over this process's part of the run, with times in seconds."""

    train_time_s: float = 0.0
    eval_time_s: float = 0.0
    loads_s: list[float] = field(default_factory=list)
    updates_s: list[float] = field(default_factory=list)
    steps: int = 0
    seconds_to: dict[float, float] = field(default_factory=dict)


class VisionRecorder:
    """The recorder of one run on one process.

    Only rank 0 writes, and every rank raises NumericError for a loss that is not finite. folder: the run's folder, or None to
    write no files. began: `time.perf_counter()` when the run began to load its data, from which seconds_to counts.
    """

    def __init__(
        self,
        plan: VisionPlan,
        folder: Path | None,
        *,
        start_step: int,
        past: EarlierProgress,
        began: float,
        quiet: bool = False,
    ) -> None:
        self.plan, self.folder, self.start_step, self.past, self.began = plan, folder, start_step, past, began
        self.quiet, self.totals, self.last_step = quiet, ProcessTotals(), start_step
        self.loss_last: float | None = None
        self.score: Score | None = None
        self._pending: list[StepOnDevice] = []
        self._steps: StepLog | None = None
        self._epochs: StepLog | None = None
        self._boards: list[Board | WandbBoard] = []
        self._bar: Bar | None = None
        # Of this process alone. What a resumed epoch had before is in `past`.
        self._epoch_time_s, self._epoch_steps = 0.0, 0

    def __enter__(self) -> VisionRecorder:
        if self.plan.world.is_main:
            if self.folder is not None:
                self._steps = StepLog(self.folder / "steps.csv", STEP_COLUMNS, after_step=self.start_step)
                done = self.start_step // self.plan.batch_order.steps_per_epoch
                self._epochs = StepLog(self.folder / "epochs.csv", EPOCH_COLUMNS, after_step=done)
                if self.plan.config.tensorboard:
                    self._boards.append(Board(self.folder, self.start_step))
                if self.plan.config.wandb:
                    options = asdict(self.plan.config)
                    self._boards.append(WandbBoard(self.folder, self.start_step, options))
            self._bar = Bar(self.plan.config.model, self.plan.steps, self.quiet)
        reset_peak_memory(self.plan.world.device)
        config = self.plan.config
        workers = config.num_workers if config.loader == "dataloader" else 0
        self._machine = MachineClock(self.plan.world.device, torch.get_num_threads() + workers)
        self._window_began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for board in self._boards:
            board.close(failed=kind is not None)
        if self._bar:
            self._bar.close()
        close_logs((self._epochs, self._steps), failed=kind is not None)

    def machine_time(self) -> MachineTime:
        """Return what others took of the machine since the run began."""
        return self._machine.lap()

    def begin_epoch(self) -> None:
        """Start the clock of an epoch, so that the time between two epochs does not count as training."""
        self._window_began = time.perf_counter()
        self._epoch_time_s, self._epoch_steps = 0.0, 0

    def step(self, taken: StepOnDevice, *, ends_epoch: bool) -> bool:
        """Record a finished 1-based step, and return whether the host has waited for the device."""
        self._pending.append(taken)
        self.last_step = taken.step
        if ends_epoch or taken.step % self.plan.config.log_every == 0:
            self.read()
        return not self._pending

    def read(self) -> None:
        """Wait for the device once, copy all pending losses at once, and write their steps."""
        if not self._pending:
            return
        window, self._pending = self._pending, []
        losses = torch.stack([p.loss.float() for p in window])
        if self.plan.world.world_size > 1:
            dist.all_reduce(losses)
            losses /= self.plan.world.world_size
        values = losses.tolist()
        # Either all steps have a flag or none has.
        flags = [p.skipped for p in window if p.skipped is not None]
        skipped = [int(flag) for flag in torch.stack(flags).tolist()] if flags else [None] * len(window)
        synchronize(self.plan.world.device)
        now = time.perf_counter()
        window_s, self._window_began = now - self._window_began, now
        self._epoch_time_s, self._epoch_steps = self._epoch_time_s + window_s, self._epoch_steps + len(window)
        # On a GPU a step's work is queued, and only the time of the whole window is true.
        queued = self.plan.world.device.type == "cuda"
        share_s = max(0.0, window_s - sum(p.load_s for p in window)) / len(window)
        for step, loss, is_skipped in zip(window, values, skipped, strict=True):
            self._write(step, loss, share_s if queued else step.update_s, is_skipped)
        if self._steps:
            self._steps.flush()
        if self._boards:
            mean = {"train/loss": sum(values) / len(values), "train/lr": window[-1].lr}
            for board in self._boards:
                board.scalars(window[-1].step, mean)
        if self._bar:
            self._bar.step(window[-1].step)

    def _write(self, p: StepOnDevice, loss: float, update_s: float, skipped: int | None) -> None:
        past, totals = self.past, self.totals
        past.epoch_loss_sum, past.epoch_steps = past.epoch_loss_sum + loss, past.epoch_steps + 1
        past.loss_first = loss if past.loss_first is None else past.loss_first
        past.skipped_steps += skipped or 0
        self.loss_last = loss
        totals.steps += 1
        if p.step - self.start_step > WARMUP_STEPS:
            totals.loads_s.append(p.load_s)
            totals.updates_s.append(update_s)
        if self._steps:
            row = {"step": p.step, "epoch": p.epoch, "loss": loss, "lr": p.lr, "load_s": p.load_s, "update_s": update_s}
            self._steps.append(row | {"skipped": skipped})
        if not math.isfinite(loss):
            # Every rank sees the same mean. The weights may be damaged, but the last checkpoint is not.
            raise NumericError(f"loss {loss}", f"at step {p.step}", "lower --lr, or --resume from the last checkpoint")

    def end_epoch(self, epoch: int, step: int, score: Score | None, eval_time_s: float) -> None:
        """Record a finished 1-based epoch, with its test if there was one."""
        totals, past = self.totals, self.past
        totals.train_time_s += self._epoch_time_s
        totals.eval_time_s += eval_time_s
        loss = past.epoch_loss_sum / past.epoch_steps
        rate = self._epoch_steps * self.plan.config.batch_size / self._epoch_time_s
        past.epoch_loss_sum, past.epoch_steps = 0.0, 0
        line = f"epoch {epoch:>{len(str(self.plan.config.epochs))}}/{self.plan.config.epochs}  loss {loss:.4f}"
        row: dict[str, Any] = dict.fromkeys(EPOCH_COLUMNS)
        row |= {
            "epoch": epoch,
            "step": step,
            "train_loss": loss,
            "train_time_s": self._epoch_time_s,
            "images_per_s": rate,
        }
        if score is not None:
            self._scored(score)
            row |= {"test_loss": score.loss, "test_accuracy": score.accuracy, "eval_time_s": eval_time_s}
            row["class_accuracy"] = fractions(score.class_accuracy)
            line += f"  test loss {score.loss:.4f}  {score.accuracy:.2%}"
        if self._epochs:
            self._epochs.append(row)
            self._epochs.flush()
        if self._boards:
            figures = {"epoch/train_loss": row["train_loss"], "epoch/test_loss": row["test_loss"]}
            figures |= {"epoch/test_accuracy": row["test_accuracy"], "epoch/images_per_s": rate}
            scalars = {name: value for name, value in figures.items() if value is not None}
            for board in self._boards:
                board.scalars(step, scalars)
        if self._bar:
            self._bar.say(f"{line}  {self._epoch_time_s:.1f} s  {rate:,.0f} images/s")

    def _scored(self, score: Score) -> None:
        self.score = score
        self.past.best_accuracy = max(self.past.best_accuracy, score.accuracy)
        for level in (0.99, 0.994):
            if score.accuracy >= level and level not in self.totals.seconds_to:
                self.totals.seconds_to[level] = time.perf_counter() - self.began

    def sync(self) -> None:
        """Put all rows so far on the disk, so that a run resumed from the next checkpoint finds no gap."""
        self.read()
        for part in (self._steps, self._epochs, *self._boards):
            if part:
                part.sync()

    def figures(self) -> dict[str, Any]:
        """Return the measured columns of the summary row."""
        totals, config = self.totals, self.plan.config
        row: dict[str, Any] = {"loss_first": self.past.loss_first, "loss_last": self.loss_last}
        if config.resolved_loss_scale not in (None, "none"):
            row["skipped_steps"] = self.past.skipped_steps
        if self.score is not None:
            row |= {"test_loss": self.score.loss, "test_accuracy": self.score.accuracy}
            row |= {
                "best_test_accuracy": self.past.best_accuracy,
                "class_accuracy": fractions(self.score.class_accuracy),
            }
        row |= {"seconds_to_99": totals.seconds_to.get(0.99), "seconds_to_99_4": totals.seconds_to.get(0.994)}
        row |= {"train_time_s": totals.train_time_s, "eval_time_s": totals.eval_time_s}
        if totals.updates_s:
            busy_s = sum(totals.loads_s) + sum(totals.updates_s)
            rate = len(totals.updates_s) * config.batch_size / busy_s
            n = len(totals.updates_s)
            # Means and not medians: the fast loader prepares several batches at once, and most steps wait for nothing.
            row |= {"load_s": sum(totals.loads_s) / n, "update_s": sum(totals.updates_s) / n}
            row |= {"load_fraction": sum(totals.loads_s) / busy_s, "images_per_s": rate}
            row |= {"images_per_s_per_device": rate / self.plan.world.world_size}
        return row
