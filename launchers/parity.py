"""`gptscale parity`: proof that recipes compute what one process computes, from the files that their runs leave.

fp32, dropout 0, the same global batches, accumulation and clipping at work. Compared are losses and gradient norms under
AdamW and under SGD, and under SGD the final weights too: AdamW turns the rounding noise of gradients that are truly zero
(the key projection's bias) into steps of size lr, so that its weights drift apart without meaning anything.
"""

from __future__ import annotations

import csv
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from gptscale.common.checkpoint import Reader, step_folders
from gptscale.common.config import RunConfig
from gptscale.common.errors import ConfigError
from gptscale.launchers.options import parse
from gptscale.launchers.start import start
from gptscale.launchers.sweep import chosen, workers
from gptscale.recipes import get

TOLERANCE = 1e-5


@dataclass(frozen=True)
class ParityOptions:
    """What to prove, and on how many processes."""

    recipes: str = "all"
    """Names with commas between, or all that can run here."""
    nproc: int = 2
    """Processes for each recipe that splits its batch."""
    steps: int = 20
    """Optimizer steps of each run."""
    optimizers: str = "adamw,sgd"
    """Names with commas between."""
    model: str = "tiny"
    """Preset."""
    data: str = "stdlib"
    """As in gptscale run."""
    out: Path | None = None
    """Folder for parity.csv and the runs; default a temporary one, and only the table stays."""

    def __post_init__(self) -> None:
        if not 1 <= self.nproc <= 64:
            raise ConfigError(f"nproc {self.nproc} is out of range", "in --nproc", "use 1 to 64")
        for name in self.optimizers.split(","):
            if name not in ("adamw", "sgd"):
                raise ConfigError(f"unknown optimizer {name!r}", "in --optimizers", "use adamw, sgd or adamw,sgd")


@dataclass(frozen=True)
class Options:
    """The options, in the form that the parser takes."""

    parity: ParityOptions = field(default_factory=ParityOptions)


@dataclass(frozen=True)
class Deviation:
    """Largest relative deviations of one run from one process; weights None where they say nothing."""

    recipe: str
    nproc: int
    optimizer: str
    loss: float
    grad_norm: float
    weights: float | None

    @property
    def passed(self) -> bool:
        return all(value <= TOLERANCE for value in (self.loss, self.grad_norm, self.weights or 0.0))


def main(argv: Sequence[str]) -> int:
    """Run, compare, print the table; 0 when every recipe passed."""
    options = parse(Options, argv, prog="gptscale parity", about="Each recipe against one process.").parity
    names = [n for n in chosen(options.recipes) if n != "single"]
    with tempfile.TemporaryDirectory(prefix="gptscale-parity-") as temporary:
        out = options.out or Path(temporary)
        found = [d for optimizer in options.optimizers.split(",") for d in deviations(names, optimizer, options, out)]
        show(found)
        if options.out:
            print(f"wrote {write(found, out / 'parity.csv')}")
    return 0 if all(d.passed for d in found) else 1


def deviations(names: Sequence[str], optimizer: str, options: ParityOptions, out: Path) -> list[Deviation]:
    """One process, then each recipe on the same work."""
    base = RunConfig(
        model=options.model,
        data=options.data,
        steps=options.steps,
        global_batch_size=4 * options.nproc,
        grad_accum_steps=2,
        optimizer=optimizer,  # type: ignore[arg-type]
        lr=None if optimizer == "adamw" else 0.1,
        clip_grad_norm=1.0,
        warmup_steps=2,
        save_last=True,
        tensorboard=False,
        device="cpu",
        out=out,
    )
    reference = trained("single", 1, base)
    clipped = (pd.read_csv(reference / "steps.csv").grad_norm > base.clip_grad_norm).sum()
    if not clipped:
        raise ConfigError(
            "no step was clipped, so clipping was not tested", "in this run", "use more --steps or other --data"
        )
    return [
        against(reference, trained(name, workers(name, base, options.nproc), base), name, options.nproc, optimizer)
        for name in names
    ]


def trained(recipe: str, nproc: int, config: RunConfig) -> Path:
    """Run to the end; the run's folder. ConfigError if it failed: there is nothing to compare."""
    row = get(recipe)
    name = f"{recipe}-{nproc}-{config.optimizer}"
    print(f"== {recipe} on {nproc} process{'es' if nproc > 1 else ''}, {config.optimizer}", flush=True)
    status = start(
        recipe, dataclasses.replace(config, run_name=name), getattr(row.load(), row.config)(**row.preset), nproc
    )
    if status:
        raise ConfigError(f"{recipe} ended with status {status}", "in parity", "see its own message above")
    return config.out / "runs" / name


def against(reference: Path, run: Path, recipe: str, nproc: int, optimizer: str) -> Deviation:
    """How far a run's numbers are from the reference's."""
    ours, theirs = pd.read_csv(run / "steps.csv"), pd.read_csv(reference / "steps.csv")
    if list(ours.step) != list(theirs.step):
        raise ConfigError(f"{recipe} logged other steps than one process", "in parity", "report this")

    def largest(column: str) -> float:
        return float(((ours[column] - theirs[column]).abs() / theirs[column].abs()).max())

    weights = weight_deviation(reference, run) if optimizer == "sgd" else None
    return Deviation(recipe, nproc, optimizer, largest("loss"), largest("grad_norm"), weights)


def weight_deviation(reference: Path, run: Path) -> float:
    """Largest difference of any final weight, relative to the largest weight of its tensor."""
    ours, theirs = (Reader(step_folders(p / "checkpoints")[0]) for p in (run, reference))
    worst = 0.0
    for name in theirs.names():
        if name.startswith("model/"):
            a, b = ours.read(name), theirs.read(name)
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst


def show(found: Sequence[Deviation]) -> None:
    """The table."""
    table = Table(
        box=None,
        pad_edge=False,
        title=f"largest relative deviation from one process (tolerance {TOLERANCE:g})",
        title_justify="left",
    )
    for title in ("recipe", "processes", "optimizer", "loss", "gradient norm", "final weights", ""):
        table.add_column(title, justify="left" if title in ("recipe", "optimizer", "") else "right")
    for d in found:
        weights = "-" if d.weights is None else f"{d.weights:.1e}"
        verdict = "[green]pass[/]" if d.passed else "[bold red]FAIL[/]"
        table.add_row(d.recipe, str(d.nproc), d.optimizer, f"{d.loss:.1e}", f"{d.grad_norm:.1e}", weights, verdict)
    Console().print(table)


def write(found: Sequence[Deviation], path: Path) -> Path:
    """The same as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Deviation)] + ["passed"])
        writer.writeheader()
        writer.writerows({**dataclasses.asdict(d), "passed": d.passed} for d in found)
    return path
