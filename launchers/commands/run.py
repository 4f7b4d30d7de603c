"""`gptscale run`: train with one strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptscale.common.process.environments import is_inside
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_range
from gptscale.foresight.plan.frozen import with_plan
from gptscale.launchers.run.options import parse_launch, take_recipe
from gptscale.recipes import get


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes to start, or none at all."""

    nproc: int | None = None
    """Processes on this machine; default one per GPU, or one. Several nodes: see launchers/multinode.sh."""
    dry_run: bool = False
    """Print what would run and stop; nothing is created."""

    def __post_init__(self) -> None:
        check_range(self.nproc, 1, 1024, "nproc")


def main(argv: Sequence[str]) -> int:
    """Train with the recipe that the first word or a plan names, and return the run's exit status."""
    recipe, words = take_recipe(with_plan(argv), "gptscale run RECIPE [options], or gptscale run --plan FILE [options]")
    row = get(recipe)
    config, recipe_config, options = parse_launch(recipe, words, LaunchOptions)
    assert options is not None
    if not options.dry_run and is_inside(row.environment):
        begin_warm_parent(config.device, ["gptscale.launchers.run.start", *config.data_imports], row.imports)
    # After the options are parsed, because it imports torch.
    from gptscale.launchers.run.start import command_line, default_nproc, plan_run, start

    nproc = options.nproc or default_nproc(recipe, config)
    if not options.dry_run:
        return start(recipe, config, recipe_config, nproc)
    for line in plan_run(recipe, config, recipe_config, nproc).describe():
        print(line)
    print("command  " + " ".join(command_line(recipe, config, recipe_config, nproc)))
    return 0
