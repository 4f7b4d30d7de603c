"""The loop's observer: times whole steps, and every `log_every` of them reads their results at once and writes them down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from gptscale.common.devices import device_name, peak_tflops
from gptscale.common.engine import StepResult
from gptscale.common.errors import NumericError
from gptscale.common.metrics import Speed, peak_memory, reset_peak_memory, speed, synchronize
from gptscale.common.run import Run
from gptscale.results.writer import StepLog

FP16_SKIPS_MAX = 30  # from 2**16 the scale is at its floor after 16; what still overflows then is no matter of scale


class Pending(NamedTuple):
    """A step whose results are still on the device."""

    step: int
    lr: float
    result: StepResult
    data_wait_s: float


class Recorder:
    """Observer of one run on one process; only rank 0 writes, every rank watches for numbers that are none.

    Between synchronisations steps run ahead of the host, so that only the window as a whole has a true time; its steps
    share it equally. What the loop does beside steps (saving, evaluating) is `paused` and not timed.
    sequences(step, rank): which sequences of the data a rank had in 0-based `step`, to name a bad batch.
    """

    def __init__(
        self, run: Run, folder: Path, *, start_step: int = 0, sequences: Callable[[int, int], tuple[int, ...]] = lambda s, r: ()
    ) -> None:
        self.run, self.folder, self.sequences = run, folder, sequences
        self.start_step = self.last_step = start_step
        self.peak_tflops = peak_tflops(device_name(run.world.device), run.config.precision)
        self.step_times_s: list[float] = []
        self.data_waits_s: list[float] = []
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self._pending: list[Pending] = []
        self._waited_s = self._paused_s = 0.0
        self._skipped = 0
        self._log: StepLog | None = None
        self._evals: StepLog | None = None
        self._board: Any = None
        self._bar: Progress | None = None

    def __enter__(self) -> Recorder:
        if self.run.world.is_main:
            self._log = StepLog(self.folder / "steps.csv", after_step=self.start_step)
            if self.run.config.eval_every:
                self._evals = StepLog(self.folder / "eval.csv", ("step", "loss"), after_step=self.start_step)
            if self.run.config.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                # purge_step: on resume, TensorBoard forgets what was written beyond the checkpoint
                self._board = SummaryWriter(str(self.folder), purge_step=self.start_step + 1 if self.start_step else None)
            self._start_bar()
        reset_peak_memory(self.run.world.device)
        self._window_began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._read_window()
        for log in (self._log, self._evals):
            if log:
                log.close()
        if self._board:
            self._board.close()
        if self._bar:
            self._bar.stop()

    def _start_bar(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, transient=True)
        if bar.console.is_terminal:  # in a log file a bar is noise
            bar.start()
            self._task = bar.add_task(self.run.recipe, total=self.run.config.steps, completed=self.start_step)
            self._bar = bar

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Times the wait for a batch."""
        began = time.perf_counter()
        yield
        self._waited_s = time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside out of the step times."""
        began = time.perf_counter()
        yield
        self._paused_s += time.perf_counter() - began

    def step(self, step: int, lr: float, result: StepResult) -> bool:
        """Note a finished 1-based step; True when the window was read, that is when the host waited for the device."""
        self._pending.append(Pending(step, lr, result, self._waited_s))
        self.last_step = step
        if step % self.run.config.log_every and step != self.run.config.steps:
            return False
        self._read_window()
        return True

    def evaluated(self, step: int, loss: Tensor) -> None:
        """Note the loss on held-out sequences after `step`."""
        value = loss.item()
        if self._evals:
            self._evals.append({"step": step, "loss": value})
        if self._board:
            self._board.add_scalar("eval/loss", value, step)
        self._say(f"step {step}/{self.run.config.steps}  eval loss {value:.4f}")

    def sync(self) -> None:
        """Rows so far to the disk; called before a checkpoint, so that a resumed run finds no gap."""
        self._read_window()
        for log in (self._log, self._evals):
            if log:
                log.sync()
        if self._board:
            self._board.flush()

    def speed(self) -> Speed:
        """The speed columns over the timed steps."""
        return speed(
            self.step_times_s,
            self.data_waits_s,
            tokens_per_step=self.run.tokens_per_step,
            world_size=self.run.world.world_size,
            gpt=self.run.gpt,
            seq_len=self.run.seq_len,
            activation_checkpointing=self.run.config.activation_checkpointing,
            peak_tflops=self.peak_tflops,
        )

    def _read_window(self) -> None:
        """Wait for the device once, then write every pending step."""
        if not self._pending:
            return
        # One copy from the device for the whole window.
        rows = [torch.cat([p.result.loss.view(1), p.result.grad_norm.to(p.result.loss.device).view(1), p.result.rank_losses]) for p in self._pending]
        values = torch.stack(rows).tolist()
        synchronize(self.run.world.device)
        now = time.perf_counter()
        step_time_s = (now - self._window_began - self._paused_s) / len(self._pending)
        window, self._pending = self._pending, []
        for pending, (loss, grad_norm, *rank_losses) in zip(window, values, strict=True):
            self._write(pending, loss, grad_norm, step_time_s)
            self._check(pending.step, loss, grad_norm, rank_losses)
        if self._log:
            self._log.flush()
        self._window_began, self._paused_s = time.perf_counter(), 0.0

    def _write(self, pending: Pending, loss: float, grad_norm: float, step_time_s: float) -> None:
        step = pending.step
        if self.loss_first is None:
            self.loss_first = loss
        self.loss_last = loss
        if step - self.start_step > self.run.config.timing_warmup_steps:
            self.step_times_s.append(step_time_s)
            self.data_waits_s.append(pending.data_wait_s)
        if self._log is None:
            return
        row = {
            "step": step,
            "tokens": step * self.run.tokens_per_step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": pending.lr,
            "step_time_s": step_time_s,
            "data_wait_s": pending.data_wait_s,
        }
        self._log.append(row)
        memory = peak_memory(self.run.world.device)
        peak_gib = memory.rss_gib if memory.allocated_gib is None else memory.allocated_gib
        tokens_per_s = self.run.tokens_per_step / step_time_s
        if self._board:
            scalars = {"loss": loss, "grad_norm": grad_norm, "lr": pending.lr, "tokens_per_s": tokens_per_s, "peak_mem_gib": peak_gib}
            for tag, value in scalars.items():
                self._board.add_scalar(f"train/{tag}", value, step)
        self._say(self._line(step, loss, step_time_s, peak_gib))
        if self._bar:
            self._bar.update(self._task, completed=step)

    def _line(self, step: int, loss: float, step_time_s: float, peak_gib: float) -> str:
        one = self.run
        now = speed(
            [step_time_s],
            [0.0],
            tokens_per_step=one.tokens_per_step,
            world_size=one.world.world_size,
            gpt=one.gpt,
            seq_len=one.seq_len,
            activation_checkpointing=one.config.activation_checkpointing,
            peak_tflops=self.peak_tflops,
        )
        left = int((one.config.steps - step) * step_time_s)
        mfu = "-" if now.mfu is None else f"{now.mfu:.1%}"
        return (
            f"step {step:>{len(str(one.config.steps))}}/{one.config.steps}  loss {loss:.4f}  {step_time_s * 1e3:,.1f} ms  "
            f"{now.tokens_per_s:,.0f} tok/s  {peak_gib:.2f} GiB  {now.tflops_per_device:.3f} TFLOP/s  MFU {mfu}  "
            f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        )

    def _say(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, highlight=False)
        elif self.run.world.is_main:
            print(line, flush=True)

    def _check(self, step: int, loss: float, grad_norm: float, rank_losses: list[float]) -> None:
        """Stop at numbers that are none; the engine has left the weights as they were before that step."""
        self._skipped = 0 if math.isfinite(grad_norm) else self._skipped + 1
        scaled = self.run.config.precision == "fp16"  # a skipped step and a halved scale are its normal way
        if math.isfinite(loss) and (math.isfinite(grad_norm) or (scaled and self._skipped < FP16_SKIPS_MAX)):
            return
        bad = [rank for rank, share in enumerate(rank_losses) if not math.isfinite(share)]
        named = "; ".join(f"data rank {r}, sequences {list(self.sequences(step - 1, r))[:16]}" for r in bad)
        what = f"loss {loss}, gradient norm {grad_norm}" if not scaled else f"loss {loss}, {self._skipped} fp16 steps overflowed in a row"
        raise NumericError(
            what, f"at step {step}" + (f" ({named})" if named else ""), "lower --lr, or look at that batch; the weights are unharmed"
        )
