"""`gptscale run`: train with one strategy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.process.environments import is_inside
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_range
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
    print("command  " + shlex.join(command_line(recipe, config, recipe_config, nproc)))
    return 0


def with_plan(argv: Sequence[str]) -> list[str]:
    """Return a command line with what its --plan says before what the user types: the recipe, the processes, all options.

    An option that the user types takes the place of the plan's.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--plan") else [word])]
    path, number = _value(words, "--plan"), _value(words, "--plan-row")
    if path is None:
        return list(argv)
    if number is not None and not number.isdecimal():
        raise ConfigError(f"{number!r} is no row", "in --plan-row", "use a number of the plan's table")
    from gptscale.common.settings.plan_file import read_row

    row = read_row(Path(path), int(number) if number else None)
    own = words[:1] if not words[0].startswith("-") else [row.recipe]
    if row.nodes > 1:
        per_node = str(row.ranks // row.nodes)
        words = ["gptscale", "submit", row.recipe, "--nodes", str(row.nodes), "--gpus-per-node", per_node]
        fix = "use " + shlex.join([*words, *row.words, "--plan", str(path)])
        raise ConfigError(f"the plan is for {row.nodes} nodes", "in --plan", fix)
    return [*own, "--nproc", str(row.ranks), *row.words, *(words[1:] if own == words[:1] else words)]


def _value(words: Sequence[str], option: str) -> str | None:
    place = max((i for i, word in enumerate(words[:-1]) if word == option), default=-1)
    return words[place + 1] if place >= 0 else None
