"""The record of a vision run beside its steps: run.json at its start, a row of lenet.csv and status.json at its end."""

from __future__ import annotations

import dataclasses
import platform
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from gptscale.common.measure.contention import MachineTime, taken_fraction
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.evidence import RankEvidence
from gptscale.common.measure.speed import Memory, peak_memory
from gptscale.common.model.precision import emulation
from gptscale.common.process.world import gather_objects
from gptscale.lenet.run.columns import append_summary
from gptscale.lenet.run.evidence import leave_vision_evidence
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import VisionRecorder
from gptscale.lenet.run.strategy import backend_of, strategy_of
from gptscale.results.record.facts import git_commit, highest
from gptscale.results.record.files import host_name, write_json
from gptscale.results.record.run_folder import RunEnd, leave_end, leave_row, of_this_start, run_directory
from gptscale.results.record.usage import Usage, over_ranks

# Columns that are options of the same name.
OPTION_COLUMNS = (
    "model operators gelu batch_norm augment loader num_workers precision amp channels_last batch_size epochs optimizer lr "
    "lr_schedule weight_decay label_smoothing seed study variant"
).split()


def new_run_id(model: str) -> str:
    """Return a name for a run without one: model, UTC time, and four hex digits that tell apart runs of the same second."""
    return f"lenet-{model}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:4]}"


class VisionRunRow:
    """The folder and the row of a run, which rank 0 writes.

    began: `time.perf_counter()` when the run began to load its data. is_on_disk: False if the disk did not take the row.
    ended: how the run ended, set when its steps are over.
    """

    def __init__(self, plan: VisionPlan, *, began: float, data_time_s: float, quiet: bool) -> None:
        self.plan, self.began, self.data_time_s, self.quiet = plan, began, data_time_s, quiet
        self.run_id = ""
        self.n_params: int | None = None
        self.is_on_disk = True
        self.memory: Memory | None = None
        self.evidence: RankEvidence | None = None
        self.machine_time: MachineTime | None = None
        self.ended: RunEnd | None = None
        self._ended: float | None = None

    def steps_are_over(self, recorder: VisionRecorder, exit_status: int) -> None:
        """Take the figures of this rank before anything else disturbs them, and leave how the run ended.

        All rows are on disk. A rank that dies from now on changes nothing about that.
        """
        self.memory, self._ended = peak_memory(self.plan.world.device), time.perf_counter()
        self.ended = RunEnd("interrupted" if exit_status else "ok", exit_status)
        if self.plan.world.is_main:
            row = self.identity() | {"status": self.ended.status, "error": ""} | recorder.figures()
            leave_end(self.folder, row, recorder.last_step)

    @property
    def folder(self) -> Path:
        return self.plan.config.out / "runs" / self.run_id

    def open(self, stack: ExitStack) -> None:
        """Create the run's folder, whose name rank 0 decides, and lock it until `stack` closes."""
        config = self.plan.config
        self.run_id = str(gather_objects(config.run_name or new_run_id(config.model))[0])
        if self.plan.world.is_main:
            stack.enter_context(run_directory(config.out, self.run_id, resumes=config.resume is not None))
            write_json(self.folder / "run.json", of_this_start(self.description()))
            for line in [] if self.quiet else emulation(config.precision, self.plan.world.device):
                print(line, flush=True)
        # The folder exists before any other rank goes on.
        gather_objects(None)

    def finish(
        self,
        status: str,
        error: BaseException | None,
        recorder: VisionRecorder | None,
        usage: Usage,
        *,
        alone: bool = False,
    ) -> dict[str, Any]:
        """Write the row and the status of a run that has ended, and return the row.

        After a failure, and if this rank is left `alone`, the row has its figures only, since its peers may be gone.
        """
        figures = (self.memory or peak_memory(self.plan.world.device), usage, self.evidence, self.machine_time)
        together = status in ("ok", "interrupted") and not alone
        figures_of_ranks = gather_objects(figures) if together else [figures]
        row = self.identity() | {"status": status, "error": "" if error is None else str(error)}
        row |= recorder.figures() if recorder else {}
        row |= {"data_time_s": self.data_time_s, "total_time_s": (self._ended or time.perf_counter()) - self.began}
        memories, usages, evidence, times = zip(*figures_of_ranks, strict=True)
        row |= resource_columns(list(zip(memories, usages, strict=True)))
        row["taken_fraction"] = taken_fraction([t for t in times if t])
        if self.plan.world.is_main and self.run_id:
            if recorder and not alone:
                leave_vision_evidence(self.plan, self.folder, evidence, recorder, row["taken_fraction"])
            step = recorder.last_step if recorder else 0
            path = leave_row(append_summary, self.plan.config.out, self.folder, row, step)
            self.is_on_disk = path is not None
            if path and not self.quiet:
                print_summary(row, path, self.folder)
        return row

    def identity(self) -> dict[str, Any]:
        """Return the columns that are known before the first step."""
        plan = self.plan
        config, data, world = plan.config, plan.data, plan.world
        return {name: getattr(config, name) for name in OPTION_COLUMNS} | {
            "run_id": self.run_id,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "n_params": self.n_params,
            "data": data.name,
            "n_train": len(data.train),
            "n_test": len(data.test),
            "image_size": data.side,
            "strategy": strategy_of(config, world),
            "backend": backend_of(config, world),
            "loss_scale": config.resolved_loss_scale,
            "world_size": world.world_size,
            "steps": plan.steps,
            "device": device_name(world.device),
            "threads": torch.get_num_threads(),
            "host": host_name(),
            "torch_version": torch.__version__,
            "git_commit": git_commit(),
            "workload_hash": plan.workload_hash,
        }

    def description(self) -> dict[str, Any]:
        """Return the content of run.json, which is all that is needed to repeat the run."""
        return {
            "run_id": self.run_id,
            "config": dataclasses.asdict(self.plan.config),
            "identity": self.identity(),
            "workload": self.plan.work,
            "classes": self.plan.data.classes,
            "environment": {"python": platform.python_version(), "platform": platform.platform()},
        }


def resource_columns(figures_of_ranks: Sequence[tuple[Memory, Usage]]) -> dict[str, float | None]:
    """Return the columns for memory and utilisation, from the figures of each rank."""
    memories, usages = zip(*figures_of_ranks, strict=True)
    return {f"peak_{kind}": value for kind, value in highest(memories).items()} | over_ranks(usages)


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
