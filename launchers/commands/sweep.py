"""`gptscale sweep`: the same work by several recipes, one after another, ending in their comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from gptscale.common.errors import INTERRUPTED_EXIT_STATUS, PREEMPTED_EXIT_STATUS
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_ranges, refuse_changed
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.options import default_recipe_config


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
        check_ranges(self, {"nproc": (1, 1024), "repeats": (1, 1024)})


@dataclass(frozen=True)
class RunAndSweepOptions:
    """A run's options and the sweep's."""

    run: RunConfig = field(default_factory=RunConfig)
    sweep: SweepOptions = field(default_factory=SweepOptions)


def main(argv: Sequence[str]) -> int:
    """Plan every run, start one after another, compare them, and return 1 if any failed.

    A run that fails leaves its row, and the sweep goes on.
    """
    about = "Train the same work with several recipes, then compare."
    options = parse(RunAndSweepOptions, argv, prog="gptscale sweep", about=about)
    config = options.run
    refuse_changed(config, ["resume"], "a sweep begins its runs anew", "resume one run with gptscale run RECIPE")
    begin_warm_parent(config.device, imports=["gptscale.launchers.run.start"])
    # After the options are parsed, because it imports torch.
    from gptscale.launchers.run.record import new_run_id
    from gptscale.launchers.run.space import check_memory
    from gptscale.launchers.run.start import nproc_of, plan_run, recipes_named, start

    plans = []
    for name in recipes_named(options.sweep.recipes, config):
        recipe_config = default_recipe_config(name)
        nproc = nproc_of(name, config, options.sweep.nproc)
        check_memory(plan_run(name, config, recipe_config, nproc).run, recipe_config.offload)
        plans.append((name, recipe_config, nproc))
    failures = 0
    for repeat in range(options.sweep.repeats):
        for name, recipe_config, nproc in plans:
            run_id = f"{config.run_name}-{name}-{repeat}" if config.run_name else new_run_id(name)
            processes = f"{nproc} process{'es' if nproc > 1 else ''}"
            print(f"\n== {name} on {processes} ({repeat + 1} of {options.sweep.repeats})", flush=True)
            status = start(name, dataclasses.replace(config, run_name=run_id), recipe_config, nproc)
            if status in (PREEMPTED_EXIT_STATUS, INTERRUPTED_EXIT_STATUS):
                return status
            failures += status != 0
    print(flush=True)
    from gptscale.results.comparison.write import write_comparison

    write_comparison([config.out], config.out)
    return 1 if failures else 0
