"""The command line of a run: its own options, those of the recipe and those of the launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import option_of
from gptscale.common.settings.command_line import bare_resume, changed_options, parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes import RECIPES, get

T = TypeVar("T")


def parse_run(recipe: str, argv: Sequence[str]) -> tuple[RunConfig, RecipeConfig]:
    """Return the run's and the recipe's options from a command line, or raise ConfigError for a word that is neither."""
    run, recipe_config, _ = parse_launch(recipe, argv, None)
    return run, recipe_config


def parse_launch(
    recipe: str, argv: Sequence[str], launch: type[T] | None, word: str = "run"
) -> tuple[RunConfig, RecipeConfig, T | None]:
    """Do as `parse_run`, and return the options of a command, a dataclass, beside them. word: the command's, for its help."""
    row, default = get(recipe), default_recipe_config(recipe)
    fields: list[tuple[str, Any, Any]] = [
        ("run", RunConfig, dataclasses.field(default_factory=RunConfig)),
        ("recipe", type(default), dataclasses.field(default_factory=lambda: default)),
    ]
    if launch is not None:
        fields.append(("launch", launch, dataclasses.field(default_factory=launch)))
    # Python 3.11 calls its module `types`, in whose source tyro would look for help, a third of the time that it takes.
    options = dataclasses.make_dataclass("options", fields, frozen=True, namespace={"__module__": __name__})
    parsed: Any = parse(options, bare_resume(argv), prog=f"gptscale {word} {recipe}", about=row.what)
    for field, fixed in row.preset.items():
        if getattr(parsed.recipe, field) != fixed:
            what = f"{recipe} fixes {field} {fixed}"
            raise ConfigError(what, f"in {option_of(field)}", "leave it out, or use another recipe")
    return parsed.run, parsed.recipe, getattr(parsed, "launch", None)


def take_recipe(argv: Sequence[str], usage: str) -> tuple[str, list[str]]:
    """Return the recipe that the first word names, and the other words.

    usage: the command line in short, for --help and for a ConfigError where the first word is an option.
    """
    if argv and argv[0] in ("-h", "--help"):
        from gptscale.results.render import console, table

        print(f"usage: {usage}\n\nFor the options: {usage.split(' RECIPE')[0]} ddp --help\n")
        rows = [(name, row.engine, " ".join(row.axes) or "-", row.what) for name, row in RECIPES.items()]
        console(120).print(table(("recipe", "engine", "splits", "what it does"), rows))
        raise SystemExit(0)
    if not argv or argv[0].startswith("-"):
        raise ConfigError("a recipe is missing", "on the command line", usage)
    return argv[0], list(argv[1:])


def default_recipe_config(recipe: str) -> RecipeConfig:
    """Return a recipe's options as they are without a command line: their defaults, and what its row fixes.

    Raises ConfigError if its engine is not installed.
    """
    row = get(recipe)
    config: RecipeConfig = getattr(row.load(), row.config)(**row.preset)
    return config


def option_words(recipe: str, config: RunConfig, recipe_config: RecipeConfig) -> list[str]:
    """Return the words that `parse_run` makes these two of: an option for each field that is not its default."""
    default = type(recipe_config)(**get(recipe).preset)
    return changed_options(config, RunConfig()) + changed_options(recipe_config, default)
