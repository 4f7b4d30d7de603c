"""`gptscale bench memory`: the largest micro-batch of each model that fits one device, by each way to make it fit.

A way is a recipe, what blocks keep for backward, and the precision of AdamW's moments. A prediction (formula.py)
says where to begin; each try is a run of the product in a process of its own.
docs/measurements/memory_ladder.md defines every figure.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.common.settings.run_config import MOMENT_BYTES
from gptscale.launchers.bench.memory.formula import RECIPES, Way
from gptscale.launchers.bench.memory.search import (
    GIB,
    Limits,
    limits,
    measured_gib,
    most_that,
    next_batch,
    predicted_gib,
)
from gptscale.launchers.bench.memory.trial import Job, run_try
from gptscale.launchers.bench.shape_options import check_file
from gptscale.recipes import get

MODES = ("none", "selective", "full")
OFFLOADS = tuple(recipe for recipe in RECIPES if recipe != "single")
DEFAULT_MODELS = ("1.6b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b")
UNKNOWN = ("failed", "timeout")  # of a try's ends: neither says whether there was memory enough


@dataclass(frozen=True)
class MemoryOptions:
    """What to try, within which limits, and where to write."""

    models: str = ",".join(DEFAULT_MODELS)
    """Presets with commas between."""
    ways: str = "single,zero_offload/full,fsdp_offload/full/fp32,zero_infinity/full"
    """RECIPE/CHECKPOINTING/OPTIMIZER_STATE with commas between; what is left out at the end means each that there is."""
    seq_len: int = 1024
    """Tokens per sequence."""
    memory_gib: float | None = None
    """Budget: of reserved device memory, on a CPU of resident memory; default all the device has, a CPU's machine half."""
    host_memory_gib: float | None = None
    """Host memory that a run may take; default what is available now."""
    disk_gib: float | None = None
    """Disk that zero_infinity may take; default what is free there."""
    steps: int = 5
    """Optimizer steps of each try; the first two are not timed."""
    minutes: float | None = None
    """Start no try after so long; a later call with the same --csv goes on."""
    precision: Literal["fp32", "bf16"] | None = None
    """As in gptscale run; default bf16 on CUDA, fp32 on a CPU."""
    compile: bool = False
    """torch.compile every block; the prediction is that without."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when it is there."""
    nvme_path: Path | None = None
    """zero_infinity: folder on a fast local disk; default where the runs' folders are."""
    out: Path | None = None
    """Keep the runs' own folders in this one; default none is kept."""
    dry_run: bool = False
    """Predict only; with --memory-gib for any device, one that is not here too."""
    csv: Path | None = None
    """A row per try; rows that are there already are not measured again. With --dry-run it is read, not written."""
    md: Path | None = None
    """File for the table in Markdown."""
    png: Path | None = None
    """File for the picture."""

    def __post_init__(self) -> None:
        for model in self.models.split(","):
            if model not in PRESETS:
                raise ConfigError(f"unknown model {model!r}", "in --models", did_you_mean(model, PRESETS))
        self.chosen()
        high = {"seq_len": (1, 2**22), "steps": (2, 10_000), "memory_gib": (1e-3, 1e6), "host_memory_gib": (1e-3, 1e6)}
        high["disk_gib"] = (0, 1e6)
        for name, (low, most) in (high | {"minutes": (0, 1e6)}).items():
            value = getattr(self, name)
            if value is not None and not low <= value <= most:
                option = f"in --{name.replace('_', '-')}"
                raise ConfigError(f"{name} {value} is out of range", option, f"use {low:g} to {most:g}")
        for option, file in (("--csv", self.csv), ("--md", self.md), ("--png", self.png)):
            check_file(option, file)
        for option, path in (("--nvme-path", self.nvme_path), ("--out", self.out)):
            if path is not None and not path.is_dir():
                raise ConfigError(f"{path} is no folder", f"in {option}", "make it first")

    def chosen(self) -> list[Way]:
        """The ways, each once; ConfigError for a word that is none."""
        return list(dict.fromkeys(way for word in self.ways.split(",") for way in ways_of(word)))


def ways_of(word: str) -> list[Way]:
    """The ways that RECIPE, RECIPE/CHECKPOINTING or RECIPE/CHECKPOINTING/OPTIMIZER_STATE means."""
    parts, where = word.split("/"), "in --ways"
    states = ("fp32",) if parts[0] in RECIPES and get(parts[0]).library_optimizer else tuple(MOMENT_BYTES)
    choices: tuple[tuple[str, ...], ...] = (tuple(RECIPES), MODES, states)
    if len(parts) > len(choices):
        raise ConfigError(f"{word!r} has more than three parts", where, "use RECIPE/CHECKPOINTING/OPTIMIZER_STATE")
    for part, known in zip(parts, choices, strict=False):
        if part not in known:
            raise ConfigError(f"unknown part {part!r} of {word!r}", where, did_you_mean(part, known))
    fixed = [(part,) for part in parts]
    return [Way(*way) for way in itertools.product(*fixed, *choices[len(parts) :])]


@dataclass
class Found:
    """What is known of a job. predicted: largest batch. why: it is without tries, or incomplete. tries: rows, oldest first."""

    job: Job
    predicted: int
    tries: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""

    @property
    def failure(self) -> str:
        """Why a try failed otherwise than by running out of memory; empty if none did."""
        return next((row["why"] or "failed" for row in self.tries if row["status"] in UNKNOWN), "")

    def known(self, limit: Limits) -> dict[int, bool]:
        """Batches tried, and whether each fitted."""
        return {int(row["micro_batch_size"]): limit.fits(row) for row in self.tries if row["status"] not in UNKNOWN}

    def aim(self, limit: Limits) -> int | None:
        """Where the measured peak should meet the budget: between two peaks on a straight line, else the prediction moved by the
        error of the one there is; None without any.
        """
        recipe, kind, budget = self.job.way.recipe, limit.device_type, limit.budget / GIB
        done = [row for row in self.tries if row["status"] == "ok"]
        peaks = {int(row["micro_batch_size"]): peak for row in done if (peak := measured_gib(row, kind)) is not None}
        below = max((batch for batch, peak in peaks.items() if peak <= budget), default=None)
        above = min((batch for batch, peak in peaks.items() if peak > budget), default=None)
        if below is not None and above is not None and below < above:
            return int(below + (above - below) * (budget - peaks[below]) / (peaks[above] - peaks[below]))
        nearest = above if below is None else below
        if nearest is None:
            return None
        error = peaks[nearest] - predicted_gib(self.job.need(nearest), recipe, kind)
        return most_that(lambda batch: predicted_gib(self.job.need(batch), recipe, kind) + error <= budget)

    def best(self, limit: Limits) -> dict[str, Any] | None:
        """The row of the largest batch that fitted."""
        fitting = [row for row in self.tries if limit.fits(row)]
        return max(fitting, key=lambda row: int(row["micro_batch_size"]), default=None)


def main(argv: Sequence[str]) -> int:
    """Predict, try, print, write; exit status 1 if a run failed otherwise than for want of memory."""
    from gptscale.launchers.bench.memory.ladder import Ladder, read_rows

    options = parse(
        MemoryOptions, argv, prog="gptscale bench memory", about="The largest batch that fits, by each way."
    )
    jobs = plan(options)
    said = (options.memory_gib, options.host_memory_gib, options.disk_gib)
    limit = limits(jobs[0].device_type, *said, options.nvme_path or options.out or Path(tempfile.gettempdir()))
    kept = read_rows(options.csv) if options.csv else []
    ladder = Ladder([look(job, limit, kept) for job in jobs], limit, others(kept, jobs))
    if not options.dry_run:
        search(ladder.found, limit, options.minutes, lambda: ladder.write_csv(options.csv))
    ladder.show()
    ladder.write(options.csv if not options.dry_run else None, options.md, options.png)
    return int(any(found.failure for found in ladder.found))


def plan(options: MemoryOptions) -> list[Job]:
    """A job for each model and way, on this machine's device."""
    here = torch.cuda.is_available()
    device_type = ("cuda" if here else "cpu") if options.device == "auto" else options.device
    named = device_name(torch.device(device_type)) if device_type == "cpu" or here else "no device"
    if device_type == "cuda" and not here and not (options.dry_run and options.memory_gib):
        fix = "use --device cpu, or --dry-run with --memory-gib"
        raise ConfigError("no CUDA device is visible", "in --device cuda", fix)
    precision = options.precision or ("bf16" if device_type == "cuda" else "fp32")
    same = (options.seq_len, precision, options.compile, device_type, named)
    return [
        Job(model, way, *same, options.steps, options.out, options.nvme_path)
        for model in dict.fromkeys(options.models.split(","))
        for way in options.chosen()
    ]


def look(job: Job, limit: Limits, kept: Sequence[Mapping[str, Any]]) -> Found:
    """What is known of a job before any try: its prediction, and tries that were kept. Failed ones are tried again."""
    recipe, key = job.way.recipe, job.key()
    predicted = most_that(lambda batch: not limit.lack(job.need(batch), recipe))
    mine = [dict(row) for row in kept if row["status"] != "failed" and all(row[k] == v for k, v in key.items())]
    return Found(job, predicted, mine, limit.lack(job.need(0), recipe))


def others(kept: Sequence[Mapping[str, Any]], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Kept rows that are of none of the jobs: another model, way, device or version; they stay in the file."""
    keys = [job.key() for job in jobs]
    return [dict(row) for row in kept if not any(all(row[k] == v for k, v in key.items()) for key in keys)]


def search(
    all_found: Sequence[Found],
    limit: Limits,
    minutes: float | None,
    save: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Try batches until each job's largest is known, one fails, or time is up; `save` after each."""
    began = clock()
    for found in (f for f in all_found if not f.why):
        job, recipe = found.job, found.job.way.recipe
        most = most_that(lambda batch, job=job, recipe=recipe: not limit.physical().lack(job.need(batch), recipe))  # type: ignore[misc]
        while (
            not found.failure
            and (batch := next_batch(found.known(limit), found.predicted, most, found.aim(limit))) is not None
        ):
            if minutes is not None and clock() - began >= 60 * minutes:
                found.why = "not finished: time was up"
                break
            row = run_try(job, batch)
            found.tries.append(row)
            fitted = "fits" if limit.fits(row) else row["status"] if row["status"] != "ok" else "beyond the budget"
            tell(f"{job}: batch {batch} {fitted} {row['why']}".rstrip())
            save()
        if not found.why and found.known(limit).get(most):
            found.why = f"nothing beyond {most} was tried: the machine has no memory for it"


def tell(line: str) -> None:
    """Progress, out of the way of the result."""
    print(line, file=sys.stderr, flush=True)
