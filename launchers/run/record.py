"""The record of a run beside its steps: run.json at its start, one summary row and status.json at its end."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from gptscale.common.engine import Engine
from gptscale.common.engines.rank_shapes import state_formula
from gptscale.common.measure.contention import MachineTime, taken_fraction
from gptscale.common.measure.devices import device_name, peak_tflops
from gptscale.common.measure.evidence import RankEvidence, RunEvidence, RunFacts, judged_ranks, notes
from gptscale.common.measure.speed import Figures, peak_memory
from gptscale.common.model.precision import emulation
from gptscale.common.process.begin import right_threads
from gptscale.common.process.environments import installed
from gptscale.common.process.world import gather_objects
from gptscale.common.settings.run import workload_hash
from gptscale.common.settings.run_config import AXIS_SIZES
from gptscale.launchers.run.options import option_words
from gptscale.launchers.run.preflight import ReadyRun
from gptscale.launchers.run.space import check_space
from gptscale.recipes import get
from gptscale.results.columns import SUMMARY, RunTable
from gptscale.results.record.facts import git_commit, highest, node_facts, nodes_of, state_columns
from gptscale.results.record.files import host_name, write_json
from gptscale.results.record.recorder import Recorder
from gptscale.results.record.run_folder import START, leave_end, leave_evidence, leave_row, of_this_start, run_directory

if TYPE_CHECKING:
    from gptscale.common.measure.bubble import Bubble
    from gptscale.common.measure.live_state import Offload
    from gptscale.results.record.usage import Usage

PACKAGES = "torch numpy transformers datasets deepspeed fairscale accelerate lightning-fabric colossalai".split()

# Columns that are named after the options, the recorder's figures, and the batch arithmetic, that fill them.
OF_CONFIG = "model precision steps attention activation_checkpointing compile optimizer optimizer_state seed".split()
OF_LOSS = "loss_first loss_last eval_loss bits_per_byte".split()
OF_BATCH = "dp_size micro_batch_size grad_accum_steps global_batch_size".split()


def new_run_id(recipe: str) -> str:
    """Return a name for a run that was given none: recipe, UTC time, and four random digits against twins."""
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:4]}"


class RunRecord:
    """The folder of a run, locked by this run while it lasts, into which rank 0 writes.

    ready: a run of the GPT. Another kind of run derives from this class, and says what its row and its run.json hold.
    table: gets its row. kind: begins the name of a run without one. recorder: set once it exists, so that
    even the row of a failed run holds what was measured before. evidence: set after the last step, of a run that gets a verdict.
    ended: the exit status, set when its steps are over and saved. row: what was written at the end. row_taken: whether the disk
    took it, None before that. afterwards: what rank 0 does when the other ranks are gone.
    """

    table: RunTable = SUMMARY

    def __init__(self, ready: ReadyRun, kind: str) -> None:
        self.ready = ready
        # Rank 0 decides the name.
        self.run_id: str = gather_objects(ready.run.config.run_name or new_run_id(kind))[0]
        self.folder = ready.run.config.out / "runs" / self.run_id
        self.row: dict[str, Any] = {}
        self.recorder: Recorder | None = None
        # Offload, bubble and state, which the engine alone can tell.
        self.of_engine: tuple[Any, ...] = (None, None, None)
        self.memory: Figures | None = None
        self.evidence: RankEvidence | None = None
        self.ended: int | None = None
        self.row_taken: bool | None = None
        self.afterwards: Callable[[], None] = lambda: None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        config, world = self.ready.run.config, self.ready.run.world
        nodes = nodes_of(gather_objects(node_facts(world.device)))
        if world.is_main:
            self.check_space()
            resumes = config.resume is not None
            self._stack.enter_context(run_directory(config.out, self.run_id, resumes=resumes))
            write_json(self.folder / "run.json", of_this_start(self.run_json() | {"nodes": nodes}))
            for line in emulation(config.precision, world.device):
                print(line, flush=True)
        # The folder must exist before any other rank goes on.
        gather_objects(None)
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def check_space(self) -> None:
        check_space(self.ready.run, self.folder)

    def of_this_rank(self) -> tuple[Any, ...]:
        """Return what others had of the machine, the usage of this rank, and what its engine alone can tell."""
        recorder = self.recorder
        usage = recorder.usage.usage() if recorder and recorder.usage else None
        return recorder and recorder.machine_time, usage, *self.of_engine

    def identity(self) -> dict[str, Any]:
        """Return the columns that are known before the first step."""
        run = self.ready.run
        config, world = run.config, run.world
        engine = get(run.recipe).engine
        device = device_name(world.device)
        predicted: dict[str, Any] = {}
        if config.plan is not None:
            from gptscale.common.settings.plan_file import predicted_columns

            predicted = predicted_columns(config.plan, config.plan_row)
        return {
            "run_id": self.run_id,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "recipe": run.recipe,
            **{name: getattr(config, name) for name in (*OF_CONFIG, *AXIS_SIZES)},
            **{name: getattr(run.batch, name) for name in OF_BATCH},
            "engine": engine,
            "engine_version": installed(engine),
            "n_params": run.gpt.n_params,
            "seq_len": run.seq_len,
            "vocab_size": run.gpt.vocab_size,
            "world_size": world.world_size,
            "warmup_steps": config.timing_warmup_steps,
            "tokens_total": config.steps * run.tokens_per_step,
            "lr": config.peak_lr,
            "offload": self.ready.recipe_config.offload,
            "data": self.ready.data,
            "device": device,
            "device_peak_tflops": peak_tflops(device, config.precision),
            "host": host_name(),
            "torch_version": torch.__version__,
            "git_commit": git_commit(),
            "workload_hash": workload_hash(self.ready.work),
            **predicted,
        }

    def figures(self) -> dict[str, Any]:
        """Return the columns that rank 0 measured, none if the run ended before its first step."""
        if (recorder := self.recorder) is None:
            return {}
        row: dict[str, Any] = {name: getattr(recorder, name) for name in OF_LOSS}
        row |= recorder.speed()
        row |= {"skipped_spikes": recorder.spikes.skipped(), "train_time_s": recorder.train_time_s}
        slow = recorder.slow_ranks
        return row | ({"slowest_rank": slow.rank, "slowest_rank_ratio": slow.ratio} if slow else {})

    def run_json(self) -> dict[str, Any]:
        """Return the resolved configuration and the environment, for whoever wants to repeat the run."""
        run, work = self.ready.run, self.ready.work
        options = option_words(run.recipe, run.config, self.ready.recipe_config)
        return {
            "run_id": self.run_id,
            "recipe": run.recipe,
            "command": ["gptscale", "run", run.recipe, "--nproc", str(run.world.world_size), *options],
            "config": dataclasses.asdict(run.config),
            "recipe_config": dataclasses.asdict(self.ready.recipe_config),
            "gpt": dataclasses.asdict(run.gpt),
            "batch": dataclasses.asdict(run.batch),
            "plan": self.ready.describe(),
            "world_size": run.world.world_size,
            "identity": self.identity(),
            "workload": work,
            "workload_hash": workload_hash(work),
            "environment": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "device": device_name(run.world.device),
                "packages": {name: version for name in PACKAGES if (version := installed(name))},
            },
        }

    def steps_are_over(self, engine: Engine, exit_status: int) -> None:
        """Take the figures of this rank before anything else disturbs them, and leave how the run ended.

        A rank that dies from now on changes nothing about that, if the rows of all steps are on disk.
        """
        self.of_engine = engine.offload(), engine.bubble(), engine.live_state()
        self.memory = peak_memory(self.ready.run.world.device)
        if self.recorder and self.recorder.all_rows_on_disk():
            self.ended = exit_status
            if self.ready.run.world.is_main:
                row = self.identity() | {"status": "interrupted" if exit_status else "ok", "error": ""}
                row |= self.figures() | highest([self.memory])
                leave_end(self.folder, row, self.recorder.last_step)

    def finish(self, status: str, error: BaseException | str = "", *, alone: bool = False) -> bool:
        """Write the row, the status and the closing lines unless they are, and return whether the disk took them.

        After a failure, and if this rank is left `alone`, they hold its figures only, since its peers may be gone.
        """
        if self.row_taken is not None:
            return self.row_taken
        run = self.ready.run
        own = self.memory or peak_memory(run.world.device), self.evidence, *self.of_this_rank()
        together = status in ("ok", "interrupted") and not alone
        gathered = gather_objects(own) if together else [own]
        if not run.world.is_main:
            return True
        memories, evidence, times, usages, *of_engines = zip(*gathered, strict=True)
        row = self.identity() | {"status": status, "error": str(error)} | self.figures()
        row |= highest(memories) | self.figures_of_ranks(usages, *of_engines, together=together)
        row["taken_fraction"] = taken_fraction([time for time in times if time]) if together else None
        ranks = [of_rank for of_rank in evidence if of_rank is not None]
        judged = self.run_evidence(ranks, times, row) if together and len(ranks) == len(evidence) else None
        has_evidence = judged is not None and leave_evidence(self.folder, judged)
        path = leave_row(self.table, self.folder, row, self.recorder.last_step if self.recorder else 0)
        self.row, self.row_taken = row, path is not None
        if path and self.recorder:
            self.tell(path, has_evidence=has_evidence)
        return self.row_taken

    def tell(self, path: Path, *, has_evidence: bool) -> None:
        from gptscale.results.record.summary import print_summary

        print_summary(self.row, path, self.folder)
        if self.ready.run.config.sample and self.row["status"] == "ok":
            from gptscale.launchers.run.samples import print_samples

            self.afterwards = partial(print_samples, self.ready, self.folder)
        if has_evidence and START not in os.environ:
            print(f"  verdict gptscale why {self.folder} tells what limits its speed", flush=True)

    def figures_of_ranks(self, usages: Sequence[Usage | None], *of_engines: Any, together: bool) -> dict[str, Any]:
        """Return the columns that depend on all ranks, beside memory and what others had of the machine."""
        offloads, bubbles, states = of_engines
        row = offload_figures(offloads, self.recorder) | (bubble_figures(bubbles, self.recorder) if together else {})
        row |= state_columns(states, state_formula(self.ready.run, self.ready.recipe_config))
        if of_gpus := [usage for usage in usages if usage]:
            # Only a run on GPUs is sampled.
            from gptscale.results.record.usage import over_ranks

            row["gpu_util_percent"] = over_ranks(of_gpus).get("gpu_util_percent")
        return row

    def run_evidence(
        self, ranks: Sequence[RankEvidence], times: Sequence[MachineTime | None], row: dict[str, Any]
    ) -> RunEvidence | None:
        """Return the evidence of all ranks for whoever judges the run, None if no step was timed."""
        if self.recorder is None or not self.recorder.step_times_s:
            return None
        run, slow, late = self.ready.run, self.recorder.slow_ranks, None
        cuda = run.world.device.type == "cuda"
        # On a GPU only the host's side of a rank is known there.
        if slow and slow.rank is not None and slow.ratio and not cuda:
            late = slow.rank, slow.ratio
        facts = RunFacts(
            run.recipe,
            cuda=cuda,
            pipeline=self.of_engine[1] is not None,
            compiled=run.config.compile,
            micro_batch_size=run.batch.micro_batch_size,
            grad_accum_steps=run.batch.grad_accum_steps,
            threads=torch.get_num_threads(),
            right_threads=right_threads(),
        )
        of_ranks, noted = judged_ranks(ranks, late), notes(ranks, times, row.get("offload_wait_fraction"))
        times_s, taken = self.recorder.step_times_s, row["taken_fraction"]
        return RunEvidence(self.table.file, facts, of_ranks, times_s, taken, late, noted)


def offload_figures(offloads: Sequence[Offload | None], recorder: Recorder | None) -> dict[str, Any]:
    """Return the columns on offload.

    Bytes are the most of any rank, rates the slowest rank's, and waiting is the most of any rank as a share of the timed
    steps.
    """
    measured = [o for o in offloads if o is not None]
    if not measured or recorder is None:
        return {}
    n, total_s = len(recorder.step_times_s), sum(recorder.step_times_s)
    reads = [o.read_bytes_per_s for o in measured if o.read_bytes_per_s]
    writes = [o.write_bytes_per_s for o in measured if o.write_bytes_per_s]
    return {
        "offload_cpu_gib": max(o.cpu_bytes for o in measured) / 2**30,
        "offload_disk_gib": max(o.disk_bytes for o in measured) / 2**30,
        "offload_read_gib_per_s": min(reads) / 2**30 if reads else None,
        "offload_write_gib_per_s": min(writes) / 2**30 if writes else None,
        "offload_wait_fraction": max(sum(o.waits_s[-n:]) for o in measured) / total_s if n else None,
    }


def bubble_figures(bubbles: Sequence[Bubble | None], recorder: Recorder | None) -> dict[str, Any]:
    """Return the columns on the pipeline bubble.

    That is the share of the timed steps in which ranks computed nothing, over all ranks, and the same by the schedule alone.
    """
    measured = [b for b in bubbles if b is not None]
    if not measured or recorder is None:
        return {}
    n = len(recorder.step_times_s)
    busy_s = sum(sum(b.busy_s[-n:]) for b in measured)
    span_s = sum(sum(b.span_s[-n:]) for b in measured)
    return {"bubble_fraction": 1 - busy_s / span_s if n else None, "bubble_fraction_theory": measured[0].theory}
