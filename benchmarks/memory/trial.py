"""One try of a batch, which is a run of the product in a process of its own, and what a job's tries tell."""

from __future__ import annotations

import csv
import importlib.metadata
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.search import GIB, Limits, Need, WayToFit, largest_batch, measured_gib, next_batch, predicted_gib
from benchmarks.task import LIMIT_S
from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.common.process.world import World, runs_on_cuda
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.settings.shape import ModelConfig
from gptscale.foresight.memory.bound import bound
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import get

# Two rows that agree in these columns measure the same. For recipes without another engine `engine_version` is torch's again.
KEY = (
    "model recipe activation_checkpointing optimizer_state seq_len precision compile device torch_version engine_version"
).split()
FIGURES = (
    "tokens_per_s step_time_s_median peak_mem_allocated_gib peak_mem_reserved_gib peak_rss_gib offload_cpu_gib offload_disk_gib"
).split()
# statuses of a try that do not say whether there was memory enough
UNKNOWN = ("failed", "timeout")
COLUMNS = [*KEY, "micro_batch_size", "status", "why", "largest", *FIGURES, "predicted_gib", "steps"]


@dataclass(frozen=True)
class Job:
    """A model and a way to train it, which is what its tries have in common.

    device: the name of the device that they run on.
    """

    model: str
    way: WayToFit
    seq_len: int
    precision: str
    compile: bool
    device_type: str
    device: str
    steps: int
    out: Path | None = None
    nvme_path: Path | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.way}"

    @property
    def gpt(self) -> ModelConfig:
        """Return the shape that is trained, whose table of positions is at least a sequence long."""
        return RunConfig(model=self.model, seq_len=self.seq_len).gpt()

    def need(self, batch: int) -> Need:
        """Return the predicted bytes of a step of `batch` sequences, where 0 leaves what does not depend on them."""
        run, config = planned(self)
        places = bound(replace(run, batch=replace(run.batch, micro_batch_size=batch)), config)
        return Need(places.on_device, places.host, places.disk)

    def key(self) -> dict[str, Any]:
        """Return the cells of KEY, by which a row is recognised as this job's."""
        cells = {
            "model": self.model,
            **self.way._asdict(),
            "seq_len": self.seq_len,
            "precision": self.precision,
            "compile": self.compile,
            "device": self.device,
            "torch_version": torch.__version__,
            "engine_version": engine_version(self.way.recipe),
        }
        return {name: cells[name] for name in KEY}

    def owns(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is of this job."""
        return all(row[name] == value for name, value in self.key().items())

    def search(self, limit: Limits, rows: Sequence[Mapping[str, Any]]) -> JobSearch:
        """Return the search before any new try: its prediction, and its tries among `rows`, of which failed ones are dropped."""
        recipe = self.way.recipe
        predicted = largest_batch(lambda batch: not limit.lack(self.need(batch), recipe))
        tries = [dict(row) for row in rows if row["status"] != "failed" and self.owns(row)]
        return JobSearch(self, predicted, tries, limit.lack(self.need(0), recipe))

    def words(self, batch: int) -> list[str]:
        """Return the options of the run that bear on its memory."""
        words = f"--model {self.model} --seq-len {self.seq_len} --data synthetic --device {self.device_type}".split()
        words += ["--micro-batch-size", str(batch), "--global-batch-size", str(batch), "--precision", self.precision]
        words += ["--activation-checkpointing", self.way.activation_checkpointing]
        return [*words, "--optimizer-state", self.way.optimizer_state]

    def program(self, batch: int, out: Path) -> Program:
        """Return the program of the run, as a user would type it."""
        words = [*self.words(batch), "--steps", str(self.steps)]
        words += f"--timing-warmup-steps {min(2, self.steps - 1)} --no-tensorboard --nproc 1".split()
        words += ["--out", str(out)]
        if self.compile:
            words.append("--compile")
        if get(self.way.recipe).preset.get("offload") == "nvme" and self.nvme_path is not None:
            words += ["--nvme-path", str(self.nvme_path)]
        return Program("gptscale.launchers.cli", ("run", self.way.recipe, *words))


@dataclass
class JobSearch:
    """The search for a job's largest batch.

    predicted: the largest batch by the bound. tries: rows, oldest first. why: the search has no tries, or is incomplete,
    for this reason.
    """

    job: Job
    predicted: int
    tries: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    @property
    def failure(self) -> str:
        """Return why a try failed for another reason than memory, empty if none did."""
        return next((row["why"] or "failed" for row in self.tries if row["status"] in UNKNOWN), "")

    def fitted(self, limit: Limits) -> dict[int, bool]:
        """Return the batches tried, and whether each fitted."""
        return {int(row["micro_batch_size"]): limit.fits(row) for row in self.tries if row["status"] not in UNKNOWN}

    def most(self, limit: Limits) -> int:
        """Return the largest batch that may be tried without danger to the machine."""
        physical, recipe = limit.physical(), self.job.way.recipe
        return largest_batch(lambda batch: not physical.lack(self.job.need(batch), recipe))

    def next_batch(self, limit: Limits) -> int | None:
        """Return the batch to try next, or None once the largest is found or a try failed."""
        if self.failure:
            return None
        return next_batch(self.fitted(limit), self.predicted, self.most(limit), self.aim(limit))

    def aim(self, limit: Limits) -> int | None:
        """Return the batch whose measured peak should meet the budget, or None without any measured peak.

        Between two peaks it lies on a straight line. With peaks on one side only, the prediction is moved by its error there.
        """
        recipe, kind, budget = self.job.way.recipe, limit.device_type, limit.budget / GIB
        ended_well = [row for row in self.tries if row["status"] == "ok"]
        peaks = {
            int(row["micro_batch_size"]): peak for row in ended_well if (peak := measured_gib(row, kind)) is not None
        }
        below = max((batch for batch, peak in peaks.items() if peak <= budget), default=None)
        above = min((batch for batch, peak in peaks.items() if peak > budget), default=None)
        if below is not None and above is not None and below < above:
            return int(below + (above - below) * (budget - peaks[below]) / (peaks[above] - peaks[below]))
        nearest = above if below is None else below
        if nearest is None:
            return None
        error = peaks[nearest] - predicted_gib(self.job.need(nearest), recipe, kind)
        return largest_batch(lambda batch: predicted_gib(self.job.need(batch), recipe, kind) + error <= budget)

    def best(self, limit: Limits) -> dict[str, Any] | None:
        """Return the row of the largest batch that fitted."""
        fitting = [row for row in self.tries if limit.fits(row)]
        return max(fitting, key=lambda row: int(row["micro_batch_size"]), default=None)


@cache
def planned(job: Job) -> tuple[Run, RecipeConfig]:
    """Return a job's run of one sequence on one device, which need not be here, and the recipe's options."""
    config, recipe_config = parse_run(job.way.recipe, job.words(1))
    world = World(0, 0, 1, torch.device(job.device_type), LIMIT_S)
    return resolve(job.way.recipe, config, recipe_config, world), recipe_config


def engine_version(recipe: str) -> str:
    """Return the version of the engine installed for a recipe, empty if none is, as the run itself will say."""
    try:
        return importlib.metadata.version(get(recipe).engine)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_try(job: Job, batch: int) -> dict[str, Any]:
    """Run `batch` sequences per step and return the row of it.

    Its status is ok, oom, timeout or failed, with the reason in `why`.
    """
    with tempfile.TemporaryDirectory(prefix="gptscale-memory-") as folder:
        out = (job.out or Path(folder)) / f"{job.model}-{'-'.join(job.way)}-{batch}"
        try:
            ended = run_captured(job.program(batch, out), timeout=LIMIT_S, fork=not runs_on_cuda(job.device_type))
        except subprocess.TimeoutExpired:
            # `failed` would be tried again
            return make_row(job, batch, {}, "timeout", f"took more than {LIMIT_S:g} s")
        return make_row(job, batch, last_row(out / "summary.csv"), *judge(ended))


def judge(ended: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Return status and reason of a run that has ended, from its exit status and its last lines."""
    if ended.returncode == 0:
        return "ok", ""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("gptscale: error: ")]
    why = (errors or ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[0]
    why = why.removeprefix("gptscale: error: ")
    if "was killed by SIGKILL" in ended.stderr:
        # Only the kernel kills so here, when host memory is used up.
        return "oom", f"host memory: {why}"
    return ("oom" if "out of memory" in why else "failed"), why


def last_row(summary: Path) -> dict[str, str]:
    """Return the row that the run left, empty if it left none."""
    if not summary.exists():
        return {}
    with summary.open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def make_row(job: Job, batch: int, summary: Mapping[str, str], status: str, why: str) -> dict[str, Any]:
    """Return the row of a try, made from `summary`, the row that the run itself left."""
    figures = {name: float(summary[name]) if summary.get(name) else None for name in FIGURES}
    predicted = {"predicted_gib": predicted_gib(job.need(batch), job.way.recipe, job.device_type)}
    cells = {"micro_batch_size": batch, "status": status, "why": why[:300], "steps": job.steps}
    return {**job.key(), **cells, **figures, **predicted}
