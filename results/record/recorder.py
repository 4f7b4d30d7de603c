"""The loop's observer, which times whole steps and writes them down.

Every `log_every` steps it reads their results from the device, all at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gptscale.common.engine import StepResult
from gptscale.common.errors import NumericError
from gptscale.common.measure.contention import MachineClock, MachineTime
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.slow_ranks import SlowRanks
from gptscale.common.measure.speed import Figures, peak_memory, reset_peak_memory, speed, synchronize
from gptscale.common.measure.spikes import SpikeWatch
from gptscale.common.process.progress import progress
from gptscale.common.settings.run import Run
from gptscale.results.record.board import Board
from gptscale.results.record.console import Bar, StepLines
from gptscale.results.record.files import warn
from gptscale.results.record.spike_log import SpikeLog
from gptscale.results.record.step_log import StepLog, close_logs, totals

if TYPE_CHECKING:
    from typing import Self

    from gptscale.results.record.usage import UsageSampler
    from gptscale.results.record.wandb_board import WandbBoard

# From 2**16 the loss scale is at its floor after 16 skipped steps. What still overflows then has another cause.
FP16_SKIPS_MAX = 30


class PendingStep(NamedTuple):
    """A step whose results are still on the device."""

    step: int
    lr: float
    result: StepResult
    data_wait_s: float


class LapTimer:
    """The seconds that pass while it is not paused. No lap ends within a pause."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, clock()

    def lap(self) -> float:
        """Return the seconds since the last lap, and begin the next."""
        before, self._since = self._since, self._clock()
        return self._since - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time of what happens inside."""
        began = self._clock()
        yield
        self._since += self._clock() - began


class Recorder:
    """Observer of one run on one process.

    Only rank 0 writes. Every rank stops the run at a loss that is NaN or infinite.
    The device runs behind the host between two synchronisations, so that only the window of steps between them has a true
    time, which its steps share equally. Writing is part of the time of the next window. What the loop does beside steps
    (saving, evaluating) is `paused` and not timed. The step before such a pause ends a window, so that no pause waits for
    steps.
    sequences(step, rank): which sequences of the data a rank had in 0-based `step`, to name a bad batch.
    bytes_per_token: of the held-out text, which makes bits per byte of a loss. None if there is no text.
    spikes: what finds spikes; it may know the steps before `start_step`.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        *,
        start_step: int = 0,
        sequences: Callable[[int, int], tuple[int, ...]] = lambda step, rank: (),
        spikes: SpikeWatch | None = None,
        bytes_per_token: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.run, self.folder, self.sequences, self.clock = run, folder, sequences, clock
        self.start_step = self.last_step = start_step
        self.device = device_name(run.world.device)
        self.step_times_s: list[float] = []
        self.data_waits_s: list[float] = []
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.bytes_per_token = bytes_per_token
        self.eval_loss: float | None = None
        # Time of all steps, warm-up included, and on rank 0 also of those before a resume.
        self.train_time_s = 0.0
        self._pending: list[PendingStep] = []
        self._waited_s = 0.0
        self._skipped = 0
        self.slow_ranks: SlowRanks | None = None
        # Processor time of the timed steps.
        self.machine_time: MachineTime | None = None
        self._machine: MachineClock | None = None
        # Only of a GPU, also of the timed steps.
        self.usage: UsageSampler | None = None
        self._sampling = ExitStack()
        self.spikes = SpikeLog(run, folder, spikes or SpikeWatch(), sequences, start_step)
        self._log: StepLog | None = None
        self._evals: StepLog | None = None
        self._boards: list[Board | WandbBoard] = []
        self._console: Bar | None = None

    def __enter__(self) -> Self:
        config, steps = self.run.config, self.folder / "steps.csv"
        if self.run.world.is_main:
            self._log = StepLog(steps, after_step=self.start_step)
            self.loss_first, _, self.train_time_s = totals(steps)
            if config.eval_every:
                self._evals = StepLog(self.folder / "eval.csv", ("step", "loss"), after_step=self.start_step)
                self.eval_loss = totals(self._evals.path)[1]
            self._begin_boards()
            second_step = speed(self.run, self.device, [1.0], [0.0])
            self._console = StepLines(self.run.recipe, config.steps, self.run.tokens_per_step, second_step)
        reset_peak_memory(self.run.world.device)
        warm_up = self.start_step + self.run.config.timing_warmup_steps
        self.slow_ranks = SlowRanks(self.start_step, warm_up)
        self._watch = LapTimer(self.clock)
        self._watch_machine()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._read_window()
                self._watch_machine(last=True)
        finally:
            self._sampling.close()
            for board in self._boards:
                board.close(failed=kind is not None)
            if self._console:
                self._console.close()
            self.spikes.close()
            close_logs((self._evals, self._log), failed=kind is not None)

    def _begin_boards(self) -> None:
        config = self.run.config
        if config.tensorboard:
            self._boards.append(Board(self.folder, self.start_step))
        if config.wandb:
            from gptscale.results.record.wandb_board import WandbBoard

            self._boards.append(WandbBoard(self.folder, self.start_step, asdict(config)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        progress.at("data")
        progress.step = self.last_step + 1
        began = self.clock()
        yield
        self._waited_s = self.clock() - began

    def paused(self) -> AbstractContextManager[None]:
        """Keep what happens inside out of the step times."""
        return self._watch.paused()

    def step(self, step: int, lr: float, result: StepResult) -> bool:
        """Take a finished 1-based step, and return whether the host waited for the device and read the window."""
        progress.at("record")
        self._pending.append(PendingStep(step, lr, result, self._waited_s))
        self.last_step = step
        if self._ends_window(step):
            self._read_window()
        return not self._pending

    def _ends_window(self, step: int) -> bool:
        config = self.run.config
        periods = (config.log_every, config.eval_every, config.save_every, config.check_replicas)
        return any(every and step % every == 0 for every in periods) or step == config.steps

    def evaluated(self, step: int, loss: Tensor) -> None:
        """Write the loss on held-out sequences after `step`."""
        value = self.eval_loss = loss.item()
        figures = {"loss": value} | ({} if (bits := self.bits_per_byte) is None else {"bits per byte": bits})
        if self._evals:
            self._evals.append({"step": step, "loss": value})
            self._evals.flush()
        for board in self._boards:
            board.scalars(step, {f"eval/{name.replace(' ', '_')}": x for name, x in figures.items()})
        if self._console:
            told = "  ".join(f"{name} {x:.4f}" for name, x in figures.items())
            self._console.say(f"step {step}/{self.run.config.steps}  eval {told}")

    @property
    def bits_per_byte(self) -> float | None:
        """Return the last held-out loss in bits per byte of text, which does not depend on the tokenizer."""
        if self.eval_loss is None or self.bytes_per_token is None:
            return None
        return self.eval_loss / math.log(2) / self.bytes_per_token

    def sync(self) -> None:
        """Put all rows so far on disk, before a checkpoint is saved, so that a resumed run finds no gap."""
        self._read_window()
        for log in filter(None, (self._log, self._evals)):
            log.sync()

    def all_rows_on_disk(self) -> bool:
        """Put all rows on disk, and return whether the disk took them."""
        self.sync()
        return not any(log and log.holds_rows for log in (self._log, self._evals))

    def speed(self) -> Figures:
        return speed(self.run, self.device, self.step_times_s, self.data_waits_s)

    def _read_window(self) -> None:
        """Wait for the device once, by one copy for all pending steps, then write them."""
        if not self._pending:
            return
        results = [p.result for p in self._pending]
        # Under offload the gradient norm may live on another device.
        device = results[0].loss.device
        rows = [torch.cat([r.loss.view(1), r.grad_norm.to(device).view(1), r.rank_losses.to(device)]) for r in results]
        with progress.waiting():
            values = torch.stack(rows).tolist()
            synchronize(self.run.world.device)
        step_time_s = self._watch.lap() / len(self._pending)
        peaks = peak_memory(self.run.world.device)
        peak_gib = peaks["peak_mem_allocated_gib"] or peaks["peak_rss_gib"] or 0.0
        window, self._pending = self._pending, []
        for pending, (loss, grad_norm, *rank_losses) in zip(window, values, strict=True):
            self._note(pending, loss, step_time_s)
            if self.run.world.is_main:
                self._write(pending, loss, grad_norm, step_time_s, peak_gib)
            self._check(pending.step, loss, grad_norm, rank_losses)
            self.spikes.step(pending.step, loss, grad_norm)
        if self._log:
            self._log.flush()
        last = window[-1].step
        self._watch_machine(last=last == self.run.config.steps)
        slow = self.slow_ranks.step(last, last=last == self.run.config.steps) if self.slow_ranks else None
        if slow and self.run.world.is_main:
            warn(slow)

    def _watch_machine(self, *, last: bool = False) -> None:
        """Begin to watch what others take of the machine when the warm-up is over, and end that at the last step."""
        timed = self.last_step - self.start_step >= self.run.config.timing_warmup_steps
        if not self._machine and timed and not last:
            with self.paused():
                self._machine = MachineClock(self.run.world.device)
                if self.run.world.device.type == "cuda":
                    from gptscale.results.record.usage import UsageSampler

                    self.usage = UsageSampler(self.run.world.device, columns=("gpu_util_percent",))
                    self._sampling.enter_context(self.usage)
        if last and self._machine and not self.machine_time:
            self.machine_time = self._machine.lap()
            self._sampling.close()

    def _note(self, pending: PendingStep, loss: float, step_time_s: float) -> None:
        self.loss_first = loss if self.loss_first is None else self.loss_first
        self.loss_last = loss
        self.train_time_s += step_time_s
        if pending.step - self.start_step > self.run.config.timing_warmup_steps:
            self.step_times_s.append(step_time_s)
            self.data_waits_s.append(pending.data_wait_s)

    def _write(self, pending: PendingStep, loss: float, grad_norm: float, step_time_s: float, peak_gib: float) -> None:
        step, figures = pending.step, {"loss": loss, "grad_norm": grad_norm, "lr": pending.lr}
        if self._log:
            times = {"step_time_s": step_time_s, "data_wait_s": pending.data_wait_s}
            self._log.append({"step": step, "tokens": step * self.run.tokens_per_step, **figures, **times})
        if self._boards:
            rates = {"tokens_per_s": self.run.tokens_per_step / step_time_s, "peak_mem_gib": peak_gib}
            scalars = {f"train/{name}": value for name, value in (figures | rates).items()}
            for board in self._boards:
                board.scalars(step, scalars)
        if isinstance(self._console, StepLines):
            self._console.say_step(step, loss, step_time_s, peak_gib)

    def _check(self, step: int, loss: float, grad_norm: float, rank_losses: list[float]) -> None:
        """Raise NumericError for a NaN or infinite loss or gradient norm.

        The engine has left the weights as they were before that step.
        """
        self._skipped = 0 if math.isfinite(grad_norm) else self._skipped + 1
        # In fp16 it is normal that a step is skipped and the scale halved.
        scaled = self.run.config.precision == "fp16"
        if math.isfinite(loss) and (math.isfinite(grad_norm) or (scaled and self._skipped < FP16_SKIPS_MAX)):
            return
        bad_ranks = [rank for rank, loss_of_rank in enumerate(rank_losses) if not math.isfinite(loss_of_rank)]
        batches = "; ".join(f"data rank {r}, sequences {list(self.sequences(step - 1, r))[:16]}" for r in bad_ranks)
        what = f"loss {loss}, gradient norm {grad_norm}"
        if scaled:
            what = f"loss {loss}, {self._skipped} fp16 steps overflowed in a row"
        fix = "lower --lr, or look at that batch; the weights are unharmed"
        raise NumericError(what, f"at step {step}" + (f" ({batches})" if batches else ""), fix)
