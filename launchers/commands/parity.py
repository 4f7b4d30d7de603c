"""`gptscale parity`: do recipes compute what one process computes? Told from the files of their runs, on CPUs.

All runs have dropout 0, the same global batches, and gradients that are accumulated and clipped. They compute in fp32, or all
in bf16. Losses and gradient norms are compared under AdamW and under SGD, and the final weights too under SGD in fp32. Under
AdamW weights may differ without meaning: it turns the rounding noise of gradients that are truly zero (those of the key
projection's bias) into steps of size lr.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gptscale.common.checkpoint.reader import Reader, step_folders
from gptscale.common.errors import ConfigError
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import check_range, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.families import MODELS, preset
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.options import default_recipe_config, option_words, parse_run
from gptscale.launchers.run.start import nproc_of, plan_run, recipes_named, start
from gptscale.recipes import get
from gptscale.results.render import console, table

# Tolerances: the largest relative deviation of losses (and weights), and of gradient norms.
FP32 = (1e-5, 1e-5)
# In bf16 two correct programs differ. Under autocast the residual stream is fp32. In a model whose weights are cast
# (Recipe.casts_weights) it is bf16, and keeps 8 bits at each of some 30 roundings. Measured over 20 steps of tiny: losses 1.4e-4
# and 9.3e-4, norms 1.2e-2 and 2.5e-2 (docs/measurements/LOG.md). These limits are about twice that.
BF16_AUTOCAST = (3e-4, 2.5e-2)
BF16_CAST = (2e-3, 5e-2)
# A tensor smaller than this share of the model's largest weight holds only rounding.
ROUNDING = 1e-6


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
    """For all runs, that of one process included."""
    model: str = "tiny"
    """As in gptscale run."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks; default enough for two stages on every process."""
    seq_len: int | None = None
    """As in gptscale run. Shorter sequences prove the same in less time."""
    data: str = "stdlib"
    """As in gptscale run."""
    out: Path | None = None
    """Folder for parity.csv and the runs; default a temporary one, and only the table stays."""

    def __post_init__(self) -> None:
        check_range(self.nproc, 1, 64, "nproc")
        parse_names(self.optimizers, OPTIMIZERS, "optimizer", "--optimizers")


@dataclass(frozen=True)
class ParityRun:
    """A run that can start, of one recipe, with the options `words` that choose one of its ways to split the work."""

    recipe: str
    words: str
    nproc: int
    config: RunConfig
    recipe_config: RecipeConfig


@dataclass(frozen=True)
class Deviation:
    """The largest relative deviations of one run from one process.

    weights: None where they say nothing.
    """

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
    """Run, compare, print the table, and return 0 if every recipe passed."""
    options = parse(ParityOptions, argv, prog="gptscale parity", about="Each recipe against one process.")
    begin_warm_parent("cpu", imports=RunConfig(data=options.data).data_imports)
    asked = RunConfig(model=options.model, precision=options.precision, device="cpu")
    names = [n for n in recipes_named(options.recipes, asked) if n != "single"]
    if not names:
        raise ConfigError("the others are compared with single", "in --recipes", "name another recipe")
    with tempfile.TemporaryDirectory(prefix="gptscale-parity-") as temporary:
        out = options.out or Path(temporary)
        # All cases are made first, so that every run is checked before one starts.
        cases = [make_case(names, optimizer, options, out) for optimizer in options.optimizers.split(",")]
        results = [deviation for case in cases for deviation in deviations(*case, options)]
        show(results)
        if options.out:
            import pandas as pd

            rows = [dataclasses.asdict(deviation) | {"passed": deviation.passed} for deviation in results]
            pd.DataFrame(rows).to_csv(out / "parity.csv", index=False)
            print(f"wrote {out / 'parity.csv'}")
    return 0 if all(deviation.passed for deviation in results) else 1


def make_case(
    names: Sequence[str], optimizer: str, options: ParityOptions, out: Path
) -> tuple[ParityRun, list[ParityRun]]:
    """Plan one process and each recipe, in every way that it splits the work, and check all without starting any."""
    base = RunConfig(
        **{name: getattr(options, name) for name in ("model", "seq_len", "data", "steps", "precision")},
        n_layer=enough_layers(names, options) if options.n_layer is None else options.n_layer,
        global_batch_size=4 * options.nproc,
        optimizer=optimizer,  # type: ignore[arg-type]
        lr=0.1 if optimizer == "sgd" else None,
        clip_grad_norm=1.0,
        warmup_steps=2,
        save_last=True,
        tensorboard=False,
        # Its further steps, traced ones among them, would be a third of the work.
        verdict=False,
        device="cpu",
        out=out,
    )
    if dropout := base.gpt().dropout:
        what = f"{options.model} drops {dropout:g} of its activations, and no two ranks drop alike"
        raise ConfigError(what, "in --model", "build it with a dropout of 0")
    runs = []
    for name in names:
        nproc = nproc_of(name, base, options.nproc)
        for number, words in enumerate(default_recipe_config(name).ways(nproc)):
            try:
                runs.append(resolved(name, nproc, base, words))
            except ConfigError as error:
                # Not every model of one's own has as many blocks as a way needs. The first is each recipe's simplest.
                if not (base.is_own and number):
                    raise
                print(f"leaving out {name} {' '.join(words)}: {error}", file=sys.stderr)
    return resolved("single", 1, base, ()), runs


def deviations(one: ParityRun, runs: Sequence[ParityRun], options: ParityOptions) -> list[Deviation]:
    """Train one process, then the others, and compare each with it."""
    import pandas as pd

    reference = trained(one)
    if not (pd.read_csv(reference / "steps.csv").grad_norm > one.config.clip_grad_norm).any():
        what = "no step was clipped, so clipping was not tested"
        raise ConfigError(what, "in this run", "use more --steps or other --data")
    return [against(reference, trained(run), run, options) for run in runs]


def enough_layers(names: Sequence[str], options: ParityOptions) -> int | None:
    """Return the blocks for two stages on every process, if a recipe has stages and the preset has fewer."""
    needed = 2 * options.nproc
    has_stages = any("pp" in get(name).axes for name in names)
    return needed if has_stages and options.model in MODELS and preset(options.model).n_layer < needed else None


def resolved(recipe: str, nproc: int, config: RunConfig, words: Sequence[str]) -> ParityRun:
    """Return one run after checking it, or raise ConfigError if it cannot start."""
    name = "-".join([recipe, str(nproc), config.optimizer, *(word.strip("-") for word in words)])
    common_words = option_words(recipe, dataclasses.replace(config, run_name=name), default_recipe_config(recipe))
    config, recipe_config = parse_run(recipe, [*common_words, *words])
    # Recipes with stages accumulate by themselves.
    if plan_run(recipe, config, recipe_config, nproc).run.batch.grad_accum_steps == 1:
        config = dataclasses.replace(config, grad_accum_steps=2)
    return ParityRun(recipe, " ".join(words), nproc, config, recipe_config)


def trained(run: ParityRun) -> Path:
    """Train to the end and return the run's folder, or raise ConfigError if the run failed."""
    processes = f"{run.nproc} process{'es' if run.nproc > 1 else ''}"
    print(f"== {run.recipe} {run.words} on {processes}, {run.config.optimizer}", flush=True)
    status = start(run.recipe, run.config, run.recipe_config, run.nproc)
    if status:
        raise ConfigError(f"{run.recipe} ended with status {status}", "in parity", "see its own message above")
    return run.config.out / "runs" / str(run.config.run_name)


def against(reference: Path, folder: Path, run: ParityRun, options: ParityOptions) -> Deviation:
    """Return how far a run's numbers are from the reference's."""
    import pandas as pd

    steps, expected = pd.read_csv(folder / "steps.csv"), pd.read_csv(reference / "steps.csv")
    if list(steps.step) != list(expected.step):
        raise ConfigError(f"{run.recipe} logged other steps than one process", "in parity", "report this")

    def largest(column: str) -> float:
        return float(((steps[column] - expected[column]).abs() / expected[column].abs()).max())

    in_fp32 = options.precision == "fp32"
    weights = weight_deviation(reference, folder) if run.config.optimizer == "sgd" and in_fp32 else None
    tolerance = FP32 if in_fp32 else BF16_CAST if get(run.recipe).casts_weights else BF16_AUTOCAST
    figures = largest("loss"), largest("grad_norm"), weights, *tolerance
    return Deviation(run.recipe, run.words, options.nproc, run.config.optimizer, *figures)


def weight_deviation(reference: Path, run: Path) -> float:
    """Return the largest difference of any final weight, relative to the largest weight of its tensor."""
    saved, expected = (Reader(step_folders(p / "checkpoints")[0]) for p in (run, reference))
    found = []
    for name in expected.shapes:
        if name.startswith("model/"):
            weight, reference_weight = saved.read(name), expected.read(name)
            found.append((float((weight - reference_weight).abs().max()), float(reference_weight.abs().max())))
    # The gradient of a bias that only keys have is truly zero, and the bias is what rounding made of it.
    least = ROUNDING * max(largest for _, largest in found)
    return max(difference / max(largest, least) for difference, largest in found)


def show(deviations: Sequence[Deviation]) -> None:
    """Print the table."""
    titles = ("recipe", "processes", "optimizer", "loss", "gradient norm", "final weights", "tolerance", "")
    heading = "largest relative deviation from one process"
    printed = table(titles, left=("recipe", "optimizer", ""), no_wrap=titles, title=heading)
    for d in deviations:
        weights = "-" if d.weights is None else f"{d.weights:.1e}"
        verdict = "[green]pass[/]" if d.passed else "[bold red]FAIL[/]"
        figures = f"{d.loss:.1e}", f"{d.grad_norm:.1e}", weights, f"{d.loss_tolerance:g} {d.grad_norm_tolerance:g}"
        printed.add_row(f"{d.recipe} {d.options}".strip(), str(d.nproc), d.optimizer, *figures, verdict)
    console(140, markup=True).print(printed)
