"""`gptscale list`: the recipes, with what each splits and does."""

from __future__ import annotations

from collections.abc import Sequence

from gptscale.common.errors import ConfigError
from gptscale.recipes import RECIPES
from gptscale.results.render import console, table


def main(argv: Sequence[str]) -> int:
    """Print the table of recipes and return 0."""
    if argv:
        raise ConfigError(f"unexpected {argv[0]!r}", "after list", "gptscale list takes no options")
    rows = [(name, recipe.engine, " ".join(recipe.axes) or "-", recipe.what) for name, recipe in RECIPES.items()]
    console(120).print(table(("recipe", "engine", "splits", "what it does"), rows))
    return 0
