"""What a vision run writes: a row per step and per epoch, lines and boards while it lasts, and its run.json and row."""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptscale.common.engine import StepResult
from gptscale.common.errors import NumericError
from gptscale.common.measure.contention import MachineClock
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.evidence import RankEvidence, RunEvidence, RunFacts, judged_ranks
from gptscale.common.measure.speed import reset_peak_memory, synchronize
from gptscale.common.process.begin import right_threads
from gptscale.common.settings.run import workload_hash
from gptscale.launchers.run.record import RunRecord
from gptscale.lenet.run.columns import EPOCH_COLUMNS, LENET, STEP_COLUMNS, WARMUP_STEPS
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import Score
from gptscale.lenet.run.preflight import ReadyVisionRun
from gptscale.lenet.run.strategy import backend_of, other_devices, strategy_of
from gptscale.results.record.console import Bar
from gptscale.results.record.facts import git_commit
from gptscale.results.record.files import host_name
from gptscale.results.record.recorder import LapTimer, PendingStep, Recorder
from gptscale.results.record.step_log import StepLog
from gptscale.results.record.usage import Usage, UsageSampler, over_ranks


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


class VisionRecorder(Recorder):
    """Observer of one vision run on one process: a row for each step and for each epoch.

    began: `time.perf_counter()` when the run began to load its data, from which seconds_to counts. The times are of this
    process's part of the run.
    """

    def __init__(
        self, ready: ReadyVisionRun, folder: Path, *, start_step: int, past: EarlierProgress, began: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        super().__init__(ready.run, folder, start_step=start_step, clock=clock)
        self.ready, self.past, self.began = ready, past, began
        self.eval_time_s = 0.0
        self.updates_s: list[float] = []
        self.n_steps = 0
        self.seconds_to: dict[float, float] = {}
        self.score: Score | None = None
        # The host's seconds of each pending step, without those in which it waited for its batch.
        self._host_s: list[float] = []
        # Sums of this process alone. A resumed epoch's earlier part is in `past`.
        self._epoch_time_s, self._epoch_steps = 0.0, 0

    def __enter__(self) -> VisionRecorder:
        config, world = self.ready.config, self.ready.world
        if world.is_main:
            self._log = StepLog(self.folder / "steps.csv", STEP_COLUMNS, after_step=self.start_step)
            done = self.start_step // self.ready.batch_order.steps_per_epoch
            self._evals = StepLog(self.folder / "epochs.csv", EPOCH_COLUMNS, after_step=done)
            self._begin_boards()
            self._console = Bar(config.model, self.ready.steps)
        reset_peak_memory(world.device)
        self._machine = MachineClock(world.device, torch.get_num_threads() + config.num_workers)
        self._watch = LapTimer(self.clock)
        self._step_began = self.clock()
        return self

    def _watch_machine(self, *, last: bool = False) -> None:
        if last and self._machine:
            self.machine_time = self._machine.lap()

    def begin_epoch(self) -> None:
        """Leave out the time since the last step."""
        self._watch.lap()
        self._step_began = self.clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        with super().paused():
            yield
        self._step_began = self.clock()

    def step(self, step: int, lr: float, result: StepResult) -> bool:
        self._host_s.append(self.clock() - self._step_began - self._waited_s)
        return super().step(step, lr, result)

    def _ends_window(self, step: int) -> bool:
        return step % self.ready.config.log_every == 0 or self.ready.ends_epoch(step)

    def _read_window(self) -> None:
        """Wait for the device once, copy all pending losses at once, and write their steps."""
        if not self._pending:
            return
        window, self._pending = self._pending, []
        hosts_s, self._host_s = self._host_s, []
        world = self.ready.world
        losses = torch.stack([p.result.loss.float() for p in window])
        if world.world_size > 1:
            dist.all_reduce(losses)
            losses /= world.world_size
        values = losses.tolist()
        # Either all steps have a flag or none has.
        flags = [p.result.skipped for p in window if p.result.skipped is not None]
        skipped = [int(flag) for flag in torch.stack(flags).tolist()] if flags else [None] * len(window)
        synchronize(world.device)
        window_s = self._watch.lap()
        self._epoch_time_s, self._epoch_steps = self._epoch_time_s + window_s, self._epoch_steps + len(window)
        if world.device.type == "cuda":
            # On a GPU a step's work is queued, and only the time of the whole window is true.
            hosts_s = [max(0.0, window_s - sum(p.data_wait_s for p in window)) / len(window)] * len(window)
        for step, loss, update_s, is_skipped in zip(window, values, hosts_s, skipped, strict=True):
            self._take(step, loss, update_s, is_skipped)
        if self._log:
            self._log.flush()
        mean = {"train/loss": sum(values) / len(values), "train/lr": window[-1].lr}
        for board in self._boards:
            board.scalars(window[-1].step, mean)
        if self._console:
            self._console.step(window[-1].step)

    def _take(self, p: PendingStep, loss: float, update_s: float, skipped: int | None) -> None:
        past = self.past
        past.epoch_loss_sum, past.epoch_steps = past.epoch_loss_sum + loss, past.epoch_steps + 1
        past.loss_first = loss if past.loss_first is None else past.loss_first
        past.skipped_steps += skipped or 0
        self.loss_last = loss
        self.n_steps += 1
        if p.step - self.start_step > WARMUP_STEPS:
            self.data_waits_s.append(p.data_wait_s)
            self.updates_s.append(update_s)
        if self._log:
            epoch = -(-p.step // self.ready.batch_order.steps_per_epoch)
            times = {"load_s": p.data_wait_s, "update_s": update_s}
            self._log.append({"step": p.step, "epoch": epoch, "loss": loss, "lr": p.lr, "skipped": skipped} | times)
        if not math.isfinite(loss):
            # Every rank sees the same mean. The weights may be damaged, but the last checkpoint is not.
            raise NumericError(f"loss {loss}", f"at step {p.step}", "lower --lr, or --resume from the last checkpoint")

    def end_epoch(self, epoch: int, step: int, score: Score | None, eval_time_s: float) -> None:
        """Record a finished 1-based epoch, with its test if there was one."""
        past, seconds = self.past, self._epoch_time_s
        self.train_time_s += seconds
        self.eval_time_s += eval_time_s
        loss = past.epoch_loss_sum / past.epoch_steps
        rate = self._epoch_steps * self.ready.config.batch_size / seconds
        past.epoch_loss_sum, past.epoch_steps = 0.0, 0
        self._epoch_time_s, self._epoch_steps = 0.0, 0
        line = f"epoch {epoch:>{len(str(self.ready.config.epochs))}}/{self.ready.config.epochs}  loss {loss:.4f}"
        row: dict[str, Any] = dict.fromkeys(EPOCH_COLUMNS)
        row |= {"epoch": epoch, "step": step, "train_loss": loss, "train_time_s": seconds, "images_per_s": rate}
        if score is not None:
            self._scored(score)
            row |= {"test_loss": score.loss, "test_accuracy": score.accuracy, "eval_time_s": eval_time_s}
            row["class_accuracy"] = score.class_accuracy
            line += f"  test loss {score.loss:.4f}  {score.accuracy:.2%}"
        if self._evals:
            self._evals.append(row)
            self._evals.flush()
        figures = {f"epoch/{name}": row[name] for name in ("train_loss", "test_loss", "test_accuracy", "images_per_s")}
        for board in self._boards:
            board.scalars(step, {name: value for name, value in figures.items() if value is not None})
        if self._console:
            self._console.say(f"{line}  {seconds:.1f} s  {rate:,.0f} images/s")

    def _scored(self, score: Score) -> None:
        self.score = score
        self.past.best_accuracy = max(self.past.best_accuracy, score.accuracy)
        for level in (0.99, 0.994):
            if score.accuracy >= level and level not in self.seconds_to:
                self.seconds_to[level] = self.clock() - self.began

    def figures(self) -> dict[str, Any]:
        """Return the measured columns of the summary row."""
        config = self.ready.config
        row: dict[str, Any] = {"loss_first": self.past.loss_first, "loss_last": self.loss_last}
        if config.resolved_loss_scale not in (None, "none"):
            row["skipped_steps"] = self.past.skipped_steps
        if self.score is not None:
            row |= {"test_loss": self.score.loss, "test_accuracy": self.score.accuracy}
            row["class_accuracy"] = self.score.class_accuracy
            row["best_test_accuracy"] = self.past.best_accuracy
        row |= {"seconds_to_99": self.seconds_to.get(0.99), "seconds_to_99_4": self.seconds_to.get(0.994)}
        row |= {"train_time_s": self.train_time_s, "eval_time_s": self.eval_time_s}
        if n := len(self.updates_s):
            load_s, update_s = sum(self.data_waits_s), sum(self.updates_s)
            rate = n * config.batch_size / (load_s + update_s)
            # Means and not medians: the fast loader prepares several batches at once, and most steps wait for nothing.
            row |= {"load_s": load_s / n, "update_s": update_s / n, "load_fraction": load_s / (load_s + update_s)}
            row |= {"images_per_s": rate, "images_per_s_per_device": rate / self.ready.world.world_size}
        return row


# Columns that are options of the same name.
OPTION_COLUMNS = [name for name in LENET.names if name in VisionConfig.__dataclass_fields__]


class VisionRecord(RunRecord):
    """The record of a vision run.

    began: `time.perf_counter()` when the run began to load its data.
    """

    table = LENET
    ready: ReadyVisionRun  # type: ignore[assignment]
    recorder: VisionRecorder | None
    n_params: int | None = None

    def __init__(self, ready: ReadyVisionRun, *, began: float, data_time_s: float) -> None:
        super().__init__(ready.run, f"lenet-{ready.config.model}")
        self.began, self.data_time_s = began, data_time_s
        self.sampler = UsageSampler(ready.world.device, others=other_devices(ready.config, ready.world))

    def check_space(self) -> None:
        """Do nothing: how much a checkpoint takes is known when the engine is built."""

    def figures(self) -> dict[str, Any]:
        times = {"data_time_s": self.data_time_s, "total_time_s": time.perf_counter() - self.began}
        return times | (self.recorder.figures() if self.recorder else {})

    def of_this_rank(self) -> tuple[Any, ...]:
        return self.recorder and self.recorder.machine_time, self.sampler.usage()

    def figures_of_ranks(self, usages: Sequence[Usage | None], *of_engines: Any, together: bool) -> dict[str, Any]:
        return over_ranks([usage for usage in usages if usage])

    def run_evidence(self, ranks: Sequence[RankEvidence], times: object, row: dict[str, Any]) -> RunEvidence | None:
        recorder = self.recorder
        if recorder is None or not recorder.updates_s:
            return None
        config = self.ready.config
        facts = RunFacts(
            "", cuda=self.ready.world.device.type == "cuda", micro_batch_size=config.batch_size,
            right_threads=right_threads(), slow_loader=config.loader == "dataloader",
        )  # fmt: skip
        times_s = [load + update for load, update in zip(recorder.data_waits_s, recorder.updates_s, strict=True)]
        return RunEvidence(self.table.file, facts, judged_ranks(ranks), times_s, row["taken_fraction"])

    def tell(self, path: Path, *, has_evidence: bool) -> None:
        print_summary(self.row, path, self.folder)

    def identity(self) -> dict[str, Any]:
        config, data, world = self.ready.config, self.ready.data, self.ready.world
        return {name: getattr(config, name) for name in OPTION_COLUMNS} | {
            "run_id": self.run_id, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "n_params": self.n_params, "data": data.name, "data_fingerprint": data.fingerprint,
            "n_train": len(data.train), "n_test": len(data.test), "image_size": data.side,
            "strategy": strategy_of(config, world), "backend": backend_of(config, world),
            "loss_scale": config.resolved_loss_scale, "world_size": world.world_size, "steps": self.ready.steps,
            "device": device_name(world.device), "threads": torch.get_num_threads(), "host": host_name(),
            "torch_version": torch.__version__, "git_commit": git_commit(), "workload_hash": workload_hash(self.ready.work),
        }  # fmt: skip

    def run_json(self) -> dict[str, Any]:
        """Return the content of run.json, which is all that is needed to repeat the run."""
        return {
            "run_id": self.run_id,
            "config": dataclasses.asdict(self.ready.config),
            "identity": self.identity(),
            "workload": self.ready.work,
            "classes": self.ready.data.classes,
            "environment": {"python": platform.python_version(), "platform": platform.platform()},
        }


def print_summary(row: dict[str, Any], csv: Path, folder: Path) -> None:
    """Print the block of lines that ends a run."""

    def shown(key: str, form: str, unit: str = "") -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:{form}}{unit}"

    used = f"processor {shown('cpu_util_percent', '.0f', ' %')}"
    if row.get("gpu_util_percent") is not None:
        used += f", GPU {shown('gpu_util_percent', '.0f', ' %')} busy with {shown('gpu_mem_used_gib', '.2f', ' GiB')} in use, "
        used += shown("power_w", ".0f", " W")
    skipped = f", {row['skipped_steps']} steps skipped" if row.get("skipped_steps") else ""
    print(
        f"\n{row['model']} {row['status']} on {row['data']}: loss {shown('loss_first', '.4f')} -> {shown('loss_last', '.4f')}"
        f"{skipped}, test accuracy {shown('test_accuracy', '.2%')} of {row['n_test']:,} images\n"
        f"  speed   {shown('images_per_s', ',.0f')} images/s, load {shown('load_s', '.6f', ' s')} and update "
        f"{shown('update_s', '.6f', ' s')} per step, training {shown('train_time_s', '.1f', ' s')}, in all "
        f"{shown('total_time_s', '.1f', ' s')} (99 % after {shown('seconds_to_99', '.1f', ' s')})\n"
        f"  memory  average {shown('avg_mem_gib', '.3f', ' GiB')}, peak allocated "
        f"{shown('peak_mem_allocated_gib', '.3f', ' GiB')}, host {shown('peak_rss_gib', '.2f', ' GiB')}\n"
        f"  busy    {used}\n"
        f"  files   {folder}\n"
        f"  row     {csv}",
        flush=True,
    )
