"""The largest micro-batch of each model that fits one device, by each way to fit it: `python -m benchmarks.memory`.

A way is a recipe, what blocks keep for backward, and the precision of AdamW's moments. A bound of its
memory (foresight/memory/bound.py) says where to begin. Each try is a run of the product in a process of its own.
docs/measurements/memory_ladder.md defines every figure.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from benchmarks.measurement import print_written, tell, write_csv
from benchmarks.memory.search import WayToFit
from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import OptionNeed, check_output_file, check_range, did_you_mean, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.launchers.cli import start
from gptscale.recipes import get
from gptscale.results import render

if TYPE_CHECKING:
    from benchmarks.memory.ladder import Ladder
    from benchmarks.memory.search import Limits
    from benchmarks.memory.trial import Job, JobSearch

RECIPES = ("single", "fsdp_offload", "zero_offload", "zero_infinity")
MODES = ("none", "selective", "full")
DEFAULT_MODELS = ("1.6b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b")


@dataclass(frozen=True)
class MemoryLadderOptions:
    """What to try, within which limits, and where to write."""

    models: str = ",".join(DEFAULT_MODELS)
    """Presets with commas between."""
    ways: str = "single,zero_offload/full,fsdp_offload/full/fp32,zero_infinity/full"
    """RECIPE/CHECKPOINTING/OPTIMIZER_STATE, with commas between several. Parts left out at the end stand for all their values."""
    seq_len: int = 1024
    """Tokens per sequence."""
    memory_gib: float | None = None
    """Budget in GiB of reserved device memory, on a CPU of resident memory. Default: all of a device, half of a CPU machine."""
    host_memory_gib: float | None = None
    """Host memory in GiB that a run may take. Default: what is available now."""
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
    """For zero_infinity: a folder on a fast local disk. Default: where the runs' folders are."""
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

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("steps,minutes", lambda c: not c.dry_run, "a dry run tries no batch", "leave --dry-run out"),
    )

    def __post_init__(self) -> None:
        parse_names(self.models, PRESETS, "model", "--models")
        self.chosen()
        ranges: dict[str, tuple[float, float]] = {
            "seq_len": (1, 2**22),
            "steps": (2, 10_000),
            "memory_gib": (1e-3, 1e6),
            "host_memory_gib": (1e-3, 1e6),
            "disk_gib": (0, 1e6),
            "minutes": (0, 1e6),
        }
        for name, (low, high) in ranges.items():
            check_range(getattr(self, name), low, high, name, f"use {low:g} to {high:g}")
        for option, file in (("--csv", self.csv), ("--md", self.md), ("--png", self.png)):
            check_output_file(file, option, "cannot be written")
        for option, path in (("--nvme-path", self.nvme_path), ("--out", self.out)):
            if path is not None and not path.is_dir():
                raise ConfigError(f"{path} is no folder", f"in {option}", "make it first")

    def chosen(self) -> list[WayToFit]:
        """Return the ways, each once, or raise ConfigError for a word that is none."""
        return list(dict.fromkeys(way for word in self.ways.split(",") for way in ways_of(word)))


def ways_of(word: str) -> list[WayToFit]:
    """Return the ways that RECIPE, RECIPE/CHECKPOINTING or RECIPE/CHECKPOINTING/OPTIMIZER_STATE means."""
    parts, where = word.split("/"), "in --ways"
    has_own_optimizer = parts[0] in RECIPES and get(parts[0]).library_optimizer
    states = ("fp32",) if has_own_optimizer else tuple(OPTIMIZERS["adamw"].state_bytes)
    choices: tuple[tuple[str, ...], ...] = (tuple(RECIPES), MODES, states)
    if len(parts) > len(choices):
        raise ConfigError(f"{word!r} has more than three parts", where, "use RECIPE/CHECKPOINTING/OPTIMIZER_STATE")
    for part, possible in zip(parts, choices, strict=False):
        if part not in possible:
            raise ConfigError(f"unknown part {part!r} of {word!r}", where, did_you_mean(part, possible))
    fixed = [(part,) for part in parts]
    return [WayToFit(*way) for way in itertools.product(*fixed, *choices[len(parts) :])]


def main(argv: Sequence[str]) -> int:
    """Predict, try, print, write, and return exit status 1 if a run failed for another reason than memory."""
    about = "The largest batch that fits, by each way."
    options = parse(MemoryLadderOptions, argv, prog="python -m benchmarks.memory", about=about)
    # After the options are parsed, because they import torch and pandas.
    from benchmarks.memory.ladder import Ladder, read_rows, rows_of_other_jobs
    from benchmarks.memory.picture import draw
    from benchmarks.memory.search import limits

    jobs = plan(options)
    budgets = (options.memory_gib, options.host_memory_gib, options.disk_gib)
    files = options.nvme_path or options.out or Path(tempfile.gettempdir())
    limit = limits(jobs[0].device_type, *budgets, files)
    rows = read_rows(options.csv) if options.csv else []
    ladder = Ladder([job.search(limit, rows) for job in jobs], limit, rows_of_other_jobs(rows, jobs))
    csv = None if options.dry_run else options.csv
    if not options.dry_run:
        search(ladder.searches, limit, options.minutes, lambda: write_csv(ladder.frame(), csv))
    show(ladder)
    write_csv(ladder.frame(), csv)
    if options.md:
        options.md.write_text(ladder.markdown())
    if options.png:
        draw(ladder, options.png)
    print_written(csv, options.md, options.png)
    return int(any(job_search.failure for job_search in ladder.searches))


def plan(options: MemoryLadderOptions) -> list[Job]:
    """Return a job for each model and way, on this machine's device."""
    import torch

    from benchmarks.memory.trial import Job
    from gptscale.common.measure.devices import device_name

    has_cuda = torch.cuda.is_available()
    device_type = ("cuda" if has_cuda else "cpu") if options.device == "auto" else options.device
    name = device_name(torch.device(device_type)) if device_type == "cpu" or has_cuda else "no device"
    if device_type == "cuda" and not has_cuda and not (options.dry_run and options.memory_gib):
        fix = "use --device cpu, or --dry-run with --memory-gib"
        raise ConfigError("no CUDA device is visible", "in --device cuda", fix)
    precision = options.precision or ("bf16" if device_type == "cuda" else "fp32")
    shared = (options.seq_len, precision, options.compile, device_type, name)
    return [
        Job(model, way, *shared, options.steps, options.out, options.nvme_path)
        for model in dict.fromkeys(options.models.split(","))
        for way in options.chosen()
    ]


def search(
    searches: Sequence[JobSearch],
    limit: Limits,
    minutes: float | None,
    save: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Try batches until each job's largest is known, or a try fails, or time is up, and call `save` after each."""
    from benchmarks.memory.trial import run_try

    began = clock()
    for job_search in (s for s in searches if not s.why):
        job, most = job_search.job, job_search.most(limit)
        while (batch := job_search.next_batch(limit)) is not None:
            if minutes is not None and clock() - began >= 60 * minutes:
                job_search.why = "not finished: time was up"
                break
            row = run_try(job, batch)
            job_search.tries.append(row)
            verdict = row["status"]
            if verdict == "ok":
                verdict = "fits" if limit.fits(row) else "beyond the budget"
            tell(f"{job}: batch {batch} {verdict} {row['why']}".rstrip())
            save()
        if not job_search.why and job_search.fitted(limit).get(most):
            job_search.why = f"nothing beyond {most} was tried: the machine has no memory for it"


def show(ladder: Ladder) -> None:
    """Print the table, its notes, and the largest model of each way."""
    from benchmarks.memory.ladder import LEFT

    console = render.console(125, highlight=False)
    rows = [ladder.cells(job_search) for job_search in ladder.searches]
    console.print(ladder.heading())
    console.print(render.table(list(rows[0]), (row.values() for row in rows), left=LEFT))
    for line in ladder.notes():
        console.print(f"note: {line}")
    if ladder.has_tries():
        console.print("\nlargest model, by way")
        for line in ladder.largest():
            console.print(f"  {line}")


if __name__ == "__main__":
    sys.exit(start(main))
