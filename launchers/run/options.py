"""The command line of a run: its own options, those of the recipe and those of the launcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from gptscale.common.errors import ConfigError
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.command_line import bare_resume, changed_options, parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes import get

T = TypeVar("T")


def parse_run(recipe: str, argv: Sequence[str]) -> tuple[RunConfig, RecipeConfig]:
    """The run's and the recipe's options from a command line; ConfigError for anything that is not one of them."""
    run, recipe_config, _ = parse_launch(recipe, argv, None)
    return run, recipe_config


def parse_launch(recipe: str, argv: Sequence[str], launch: type[T] | None) -> tuple[RunConfig, RecipeConfig, T | None]:
    """As `parse_run`, with the launcher's own options (a dataclass) beside them."""
    row = get(recipe)
    config_type: type[RecipeConfig] = getattr(row.load(), row.config)
    fields: list[tuple[str, Any, Any]] = [
        ("run", RunConfig, dataclasses.field(default_factory=RunConfig)),
        ("recipe", config_type, dataclasses.field(default_factory=lambda: config_type(**row.preset))),
    ]
    if launch is not None:
        fields.append(("launch", launch, dataclasses.field(default_factory=launch)))
    options = dataclasses.make_dataclass("options", fields, frozen=True)
    parsed: Any = parse(options, bare_resume(argv), prog=f"gptscale run {recipe}", about=row.what)
    for field, fixed in row.preset.items():
        if getattr(parsed.recipe, field) != fixed:
            raise ConfigError(
                f"{recipe} fixes {field} {fixed}",
                f"in --{field.replace('_', '-')}",
                "leave it out, or use another recipe",
            )
    return parsed.run, parsed.recipe, getattr(parsed, "launch", None)


def option_words(recipe: str, config: RunConfig, recipe_config: RecipeConfig) -> list[str]:
    """The words that `parse_run` makes these two configurations of: an option for each field that is not its default."""
    return changed_options(config, RunConfig()) + changed_options(
        recipe_config, type(recipe_config)(**get(recipe).preset)
    )
