"""`gptscale sweep`: the same work by several recipes, one after another, ending in their comparison."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import refuse_changed
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.preflight import why_not_here
from gptscale.launchers.run.record import new_run_id
from gptscale.launchers.run.start import default_nproc, plan_run, runs_on_cuda, start
from gptscale.recipes import RECIPES, get
from gptscale.results.comparison.write import write_comparison


@dataclass(frozen=True)
class SweepOptions:
    """What to sweep over."""

    recipes: str = "all"
    """Names with commas between, or all that can run here."""
    nproc: int | None = None
    """Processes for each recipe that splits its batch; default one per GPU, or 2 on a CPU."""
    repeats: int = 1
    """Runs of each recipe, interleaved, so that a drifting machine does not favour one."""

    def __post_init__(self) -> None:
        for name in ("nproc", "repeats"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= 1024:
                raise ConfigError(f"{name} {value} is out of range", f"in --{name}", "use 1 to 1024")


@dataclass(frozen=True)
class Options:
    """A run's options and the sweep's."""

    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepOptions = field(default_factory=SweepOptions)


def main(argv: Sequence[str]) -> int:
    """Plan every run before the first starts; a run that fails leaves its row and the sweep goes on."""
    options = parse(
        Options, argv, prog="gptscale sweep", about="Train the same work with several recipes, then compare."
    )
    config = options.run
    refuse_changed(config, ["resume"], "a sweep begins its runs anew", "resume one run with gptscale run RECIPE")
    names = chosen(options.sweep.recipes, config)
    plans = []
    for name in names:
        recipe = get(name)
        recipe_config = getattr(recipe.load(), recipe.config)(**recipe.preset)
        nproc = workers(name, config, options.sweep.nproc)
        plan_run(name, config, recipe_config, nproc)
        plans.append((name, recipe_config, nproc))
    failures = 0
    for repeat in range(options.sweep.repeats):
        for name, recipe_config, nproc in plans:
            run_id = f"{config.run_name}-{name}-{repeat}" if config.run_name else new_run_id(name)
            print(
                f"\n== {name} on {nproc} process{'es' if nproc > 1 else ''} ({repeat + 1} of {options.sweep.repeats})",
                flush=True,
            )
            failures += start(name, dataclasses.replace(config, run_name=run_id), recipe_config, nproc) != 0
    print(flush=True)
    write_comparison([config.out], config.out)
    return 1 if failures else 0


def chosen(recipes: str, config: RunConfig) -> list[str]:
    """The recipes named, or all that can run on the device meant; those left out are said, with the reason."""
    if recipes != "all":
        return [get(name.strip()) and name.strip() for name in recipes.split(",")]
    names = []
    for name in RECIPES:
        if reason := why_not_here(name, cuda=runs_on_cuda(config.device)):
            print(f"leaving out {name}: {reason}", file=sys.stderr)
        else:
            names.append(name)
    return names


def workers(recipe: str, config: RunConfig, nproc: int | None) -> int:
    """How many processes a recipe gets: one if it splits nothing."""
    if not get(recipe).axes:
        return 1
    return nproc or (default_nproc(recipe, config) if runs_on_cuda(config.device) else 2)
