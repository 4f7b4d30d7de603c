"""The record of a vision run beside its steps: what its run.json and its row of lenet.csv hold."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from gptscale.common.measure.devices import device_name
from gptscale.common.measure.evidence import RankEvidence, RunEvidence, RunFacts, judged_ranks, right_threads
from gptscale.common.settings.run import workload_hash
from gptscale.launchers.run.record import RunRecord
from gptscale.lenet.run.columns import LENET
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.preflight import VisionPlan
from gptscale.lenet.run.recorder import VisionRecorder
from gptscale.lenet.run.strategy import backend_of, other_devices, strategy_of
from gptscale.results.record.facts import git_commit
from gptscale.results.record.files import host_name
from gptscale.results.record.usage import Usage, UsageSampler, over_ranks

# Columns that are options of the same name.
OPTION_COLUMNS = [name for name in LENET.names if name in VisionConfig.__dataclass_fields__]


class VisionRecord(RunRecord):
    """The record of a vision run.

    began: `time.perf_counter()` when the run began to load its data. quiet: a study asks for figures alone.
    """

    table = LENET
    recorder: VisionRecorder | None
    n_params: int | None = None

    def __init__(self, plan: VisionPlan, *, began: float, data_time_s: float, quiet: bool) -> None:
        # A plan has what a record asks of the GPT's: run.config and run.world.
        super().__init__(cast(Any, plan), f"lenet-{plan.config.model}", quiet=quiet)
        self.plan, self.began, self.data_time_s = plan, began, data_time_s
        self.sampler = UsageSampler(plan.world.device, others=other_devices(plan.config, plan.world))

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
        config = self.plan.config
        facts = RunFacts(
            "", cuda=self.plan.world.device.type == "cuda", micro_batch_size=config.batch_size,
            right_threads=right_threads(), slow_loader=config.loader == "dataloader",
        )  # fmt: skip
        times_s = [load + update for load, update in zip(recorder.data_waits_s, recorder.updates_s, strict=True)]
        return RunEvidence(self.table.file, facts, judged_ranks(ranks), times_s, row["taken_fraction"])

    def tell(self, path: Path, *, has_evidence: bool) -> None:
        print_summary(self.row, path, self.folder)

    def identity(self) -> dict[str, Any]:
        plan = self.plan
        config, data, world = plan.config, plan.data, plan.world
        return {name: getattr(config, name) for name in OPTION_COLUMNS} | {
            "run_id": self.run_id, "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "n_params": self.n_params, "data": data.name, "n_train": len(data.train), "n_test": len(data.test),
            "image_size": data.side, "strategy": strategy_of(config, world), "backend": backend_of(config, world),
            "loss_scale": config.resolved_loss_scale, "world_size": world.world_size, "steps": plan.steps,
            "device": device_name(world.device), "threads": torch.get_num_threads(), "host": host_name(),
            "torch_version": torch.__version__, "git_commit": git_commit(),
            "workload_hash": workload_hash(plan.work),
        }  # fmt: skip

    def run_json(self) -> dict[str, Any]:
        """Return the content of run.json, which is all that is needed to repeat the run."""
        return {
            "run_id": self.run_id,
            "config": dataclasses.asdict(self.plan.config),
            "identity": self.identity(),
            "workload": self.plan.work,
            "classes": self.plan.data.classes,
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
