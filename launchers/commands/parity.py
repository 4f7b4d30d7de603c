"""`gptscale parity`: proof that recipes compute what one process computes, on CPUs, from the files that their runs leave.

Dropout 0, the same global batches, accumulation and clipping at work; fp32, or bf16 against one process in bf16. Compared are
losses and gradient norms under AdamW and under SGD, and under SGD in fp32 the final weights too: AdamW turns the rounding noise
of gradients that are truly zero (the key projection's bias) into steps of size lr, so that its weights drift apart without
meaning anything.
"""

from __future__ import annotations

import csv
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd

from gptscale.common.checkpoint.reader import Reader, step_folders
from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.commands.sweep import chosen, workers
from gptscale.launchers.run.options import option_words, parse_run
from gptscale.launchers.run.start import plan_run, start
from gptscale.recipes import get
from gptscale.results.render import console, table

FP32 = (1e-5, 1e-5)  # largest relative deviation of losses (and weights), of gradient norms
# In bf16 two right programs differ: under autocast the residual stream is fp32, in a model whose weights are cast
# (Recipe.casts_weights) it is bf16, 8 bits at each of some 30 roundings. Seen over 20 steps of tiny: losses 1.4e-4 and 9.3e-4,
# norms 1.2e-2 and 2.5e-2 (docs/measurements/LOG.md); these limits are about twice that.
BF16_AUTOCAST = (3e-4, 2.5e-2)
BF16_CAST = (2e-3, 5e-2)


@dataclass(frozen=True)
class ParityOptions:
    """What to prove, and on how many processes."""

    recipes: str = "all"
    """Names with commas between, or all that can run on this machine's CPU."""
    nproc: int = 2
    """Processes for each recipe that splits its batch."""
    steps: int = 20
    """Optimizer steps of each run."""
    optimizers: str = "adamw,sgd"
    """Names with commas between."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of all runs, that of one process included."""
    model: str = "tiny"
    """Preset."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks; default enough for two stages on every process."""
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
class ParityRun:
    """A run that can start: one way, `words`, of splitting with one recipe."""

    recipe: str
    words: str
    nproc: int
    config: RunConfig
    recipe_config: RecipeConfig


@dataclass(frozen=True)
class Comparison:
    """One process, and what is laid beside it on the same work."""

    reference: ParityRun
    runs: list[ParityRun]


@dataclass(frozen=True)
class Deviation:
    """Largest relative deviations of one run from one process; weights None where they say nothing."""

    recipe: str
    options: str
    nproc: int
    optimizer: str
    loss: float
    grad_norm: float
    weights: float | None
    loss_tolerance: float
    grad_norm_tolerance: float

    @property
    def passed(self) -> bool:
        return max(self.loss, self.weights or 0.0) <= self.loss_tolerance and self.grad_norm <= self.grad_norm_tolerance


def main(argv: Sequence[str]) -> int:
    """Run, compare, print the table; 0 when every recipe passed."""
    options = parse(Options, argv, prog="gptscale parity", about="Each recipe against one process.").parity
    names = [n for n in chosen(options.recipes, RunConfig(device="cpu")) if n != "single"]
    with tempfile.TemporaryDirectory(prefix="gptscale-parity-") as temporary:
        out = options.out or Path(temporary)
        planned = [planned_with(names, optimizer, options, out) for optimizer in options.optimizers.split(",")]
        found = [d for comparison in planned for d in deviations(comparison, options)]  # all are checked by now
        show(found)
        if options.out:
            print(f"wrote {write(found, out / 'parity.csv')}")
    return 0 if all(d.passed for d in found) else 1


def planned_with(names: Sequence[str], optimizer: str, options: ParityOptions, out: Path) -> Comparison:
    """One process and each recipe, in every way that it splits the work: checked, and nothing started."""
    base = RunConfig(
        model=options.model,
        n_layer=options.n_layer or enough_layers(names, options),
        data=options.data,
        steps=options.steps,
        global_batch_size=4 * options.nproc,
        optimizer=optimizer,  # type: ignore[arg-type]
        precision=options.precision,
        lr=None if optimizer == "adamw" else 0.1,
        clip_grad_norm=1.0,
        warmup_steps=2,
        save_last=True,
        tensorboard=False,
        device="cpu",
        out=out,
    )
    runs = [
        resolved(name, nproc, base, words)
        for name in names
        for nproc in [workers(name, base, options.nproc)]
        for words in ways(name, nproc)
    ]
    return Comparison(resolved("single", 1, base, ()), runs)


def deviations(comparison: Comparison, options: ParityOptions) -> list[Deviation]:
    """Train one process, then the others, and compare each with it."""
    reference = trained(comparison.reference)
    clipped = (pd.read_csv(reference / "steps.csv").grad_norm > comparison.reference.config.clip_grad_norm).sum()
    if not clipped:
        raise ConfigError(
            "no step was clipped, so clipping was not tested", "in this run", "use more --steps or other --data"
        )
    return [against(reference, trained(run), run, options) for run in comparison.runs]


def ways(recipe: str, nproc: int) -> list[tuple[str, ...]]:
    """As the recipe's configuration has them."""
    row = get(recipe)
    config_type: type[RecipeConfig] = getattr(row.load(), row.config)
    return config_type.ways(nproc)


def enough_layers(names: Sequence[str], options: ParityOptions) -> int | None:
    """Blocks for two stages on every process, if a recipe has stages and the preset has fewer."""
    wanted = 2 * options.nproc
    staged = any("pp" in get(name).axes for name in names)
    return wanted if staged and PRESETS[options.model].n_layer < wanted else None


def resolved(recipe: str, nproc: int, config: RunConfig, words: Sequence[str]) -> ParityRun:
    """The run, checked; ConfigError if it cannot be."""
    row = get(recipe)
    name = "-".join([recipe, str(nproc), config.optimizer, *(word.strip("-") for word in words)])
    words_of_all = option_words(
        recipe, dataclasses.replace(config, run_name=name), getattr(row.load(), row.config)(**row.preset)
    )
    config, recipe_config = parse_run(recipe, [*words_of_all, *words])
    if plan_run(recipe, config, recipe_config, nproc).run.batch.grad_accum_steps == 1:  # stages ask for more themselves
        config = dataclasses.replace(config, grad_accum_steps=2)
    return ParityRun(recipe, " ".join(words), nproc, config, recipe_config)


def trained(run: ParityRun) -> Path:
    """Run to the end; the run's folder. ConfigError if it failed: there is nothing to compare."""
    processes = f"{run.nproc} process{'es' if run.nproc > 1 else ''}"
    print(f"== {run.recipe} {run.words} on {processes}, {run.config.optimizer}", flush=True)
    status = start(run.recipe, run.config, run.recipe_config, run.nproc)
    if status:
        raise ConfigError(f"{run.recipe} ended with status {status}", "in parity", "see its own message above")
    assert run.config.run_name is not None
    return run.config.out / "runs" / run.config.run_name


def against(reference: Path, folder: Path, run: ParityRun, options: ParityOptions) -> Deviation:
    """How far a run's numbers are from the reference's."""
    ours, theirs = pd.read_csv(folder / "steps.csv"), pd.read_csv(reference / "steps.csv")
    if list(ours.step) != list(theirs.step):
        raise ConfigError(f"{run.recipe} logged other steps than one process", "in parity", "report this")

    def largest(column: str) -> float:
        return float(((ours[column] - theirs[column]).abs() / theirs[column].abs()).max())

    sgd = run.config.optimizer == "sgd" and options.precision == "fp32"
    weights = weight_deviation(reference, folder) if sgd else None
    figures = largest("loss"), largest("grad_norm"), weights, *tolerance(run.recipe, options.precision)
    return Deviation(run.recipe, run.words, options.nproc, run.config.optimizer, *figures)


def tolerance(recipe: str, precision: str) -> tuple[float, float]:
    """The largest relative deviations of loss and gradient norm that count as the same computation."""
    return FP32 if precision == "fp32" else BF16_CAST if get(recipe).casts_weights else BF16_AUTOCAST


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
    titles = ("recipe", "processes", "optimizer", "loss", "gradient norm", "final weights", "tolerance", "")
    heading = "largest relative deviation from one process"
    printed = table(titles, left=("recipe", "optimizer", ""), no_wrap=titles, title=heading)
    for d in found:
        weights = "-" if d.weights is None else f"{d.weights:.1e}"
        verdict = "[green]pass[/]" if d.passed else "[bold red]FAIL[/]"
        printed.add_row(
            f"{d.recipe} {d.options}".strip(),
            str(d.nproc),
            d.optimizer,
            f"{d.loss:.1e}",
            f"{d.grad_norm:.1e}",
            weights,
            f"{d.loss_tolerance:g} {d.grad_norm_tolerance:g}",
            verdict,
        )
    console(140).print(printed)


def write(found: Sequence[Deviation], path: Path) -> Path:
    """The same as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Deviation)] + ["passed"])
        writer.writeheader()
        writer.writerows({**dataclasses.asdict(d), "passed": d.passed} for d in found)
    return path
