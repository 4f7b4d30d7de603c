"""One try of `gptscale bench memory`: a run of the product in a process of its own, and the row that is kept of it."""

from __future__ import annotations

import csv
import importlib.metadata
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptscale.common.process.ranks import die_with_parent
from gptscale.common.process.task import LIMIT_S
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.bench.memory.formula import Need, Step, Way, need
from gptscale.launchers.bench.memory.search import predicted_gib
from gptscale.recipes import get

# What makes two rows figures of the same thing; `engine_version` is torch's again for recipes that need no other.
KEY = (
    "model recipe activation_checkpointing optimizer_state seq_len precision compile device torch_version engine_version"
).split()
FIGURES = (
    "tokens_per_s step_time_s_median peak_mem_allocated_gib peak_mem_reserved_gib peak_rss_gib offload_cpu_gib offload_disk_gib"
).split()
COLUMNS = [*KEY, "micro_batch_size", "status", "why", "largest", *FIGURES, "predicted_gib", "steps"]


@dataclass(frozen=True)
class Job:
    """A model and a way to train it; what its tries have in common. device: the name of the one they run on."""

    model: str
    way: Way
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
    def gpt(self) -> GPTConfig:
        """The shape that is trained: its table of positions is at least a sequence long."""
        return RunConfig(model=self.model, seq_len=self.seq_len).gpt()

    def need(self, batch: int) -> Need:
        """Predicted bytes of a step of `batch` sequences; 0: of what does not depend on it."""
        return need(Step(self.gpt, batch * self.seq_len, self.precision, self.device_type), self.way)

    def key(self) -> dict[str, Any]:
        """The cells by which a row of this job is known again."""
        said = {"model": self.model, **self.way._asdict(), "seq_len": self.seq_len, "precision": self.precision}
        cells = (self.compile, self.device, torch.__version__, engine_version(self.way.recipe))
        return said | dict(zip(KEY[len(said) :], cells, strict=True))

    def command(self, batch: int, out: Path) -> list[str]:
        """The run, as a user would type it."""
        words = f"--model {self.model} --seq-len {self.seq_len} --data synthetic --device {self.device_type}".split()
        words += ["--micro-batch-size", str(batch), "--global-batch-size", str(batch), "--precision", self.precision]
        words += ["--activation-checkpointing", self.way.activation_checkpointing]
        words += ["--optimizer-state", self.way.optimizer_state, "--steps", str(self.steps)]
        words += f"--timing-warmup-steps {min(2, self.steps - 1)} --no-tensorboard --nproc 1".split()
        words += ["--out", str(out)]
        words += ["--compile"] if self.compile else []
        if get(self.way.recipe).preset.get("offload") == "nvme" and self.nvme_path is not None:
            words += ["--nvme-path", str(self.nvme_path)]
        return [sys.executable, "-m", "gptscale.launchers.cli", "run", self.way.recipe, *words]


def engine_version(recipe: str) -> str:
    """Of the engine that is installed for a recipe; empty if none is, which the run itself will say."""
    try:
        return importlib.metadata.version(get(recipe).engine)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_try(job: Job, batch: int) -> dict[str, Any]:
    """Run `batch` sequences per step and say what became of it; status ok, oom, timeout or failed, with the reason in `why`."""
    with tempfile.TemporaryDirectory(prefix="gptscale-memory-") as folder:
        out = (job.out or Path(folder)) / f"{job.model}-{'-'.join(job.way)}-{batch}"
        try:
            ended = subprocess.run(
                job.command(batch, out),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
                preexec_fn=die_with_parent,
            )
        except subprocess.TimeoutExpired:
            return row(job, batch, {}, "timeout", f"took more than {LIMIT_S:g} s")  # `failed` would be tried again
        return row(job, batch, last_row(out / "summary.csv"), *judge(ended))


def judge(ended: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Status and reason of a run that has ended, from its exit status and what it said last."""
    if ended.returncode == 0:
        return "ok", ""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("gptscale: error: ")]
    why = (errors or ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[0]
    why = why.removeprefix("gptscale: error: ")
    if "was killed by SIGKILL" in ended.stderr:  # nobody else here kills so: the kernel, out of host memory
        return "oom", f"host memory: {why}"
    return ("oom" if "out of memory" in why else "failed"), why


def last_row(summary: Path) -> dict[str, str]:
    """The row that the run left, empty if it left none."""
    if not summary.exists():
        return {}
    with summary.open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def row(job: Job, batch: int, left: dict[str, str], status: str, why: str) -> dict[str, Any]:
    """The row kept of a try; `left`: what the run left of itself."""
    found = job.need(batch)
    figures = {name: float(left[name]) if left.get(name) else None for name in FIGURES}
    predicted = {"predicted_gib": predicted_gib(found, job.way.recipe, job.device_type)}
    cells = {"micro_batch_size": batch, "status": status, "why": why[:300], "steps": job.steps}
    return {**job.key(), **cells, **figures, **predicted}
