"""The pairs that do not work are refused, and the docs have the same table."""

from pathlib import Path

import pytest

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes import RECIPES, unsupported


def test_the_docs_have_the_same_table():
    page = Path(__file__).parents[2] / "docs" / "recipes" / "unsupported.md"
    assert unsupported.as_markdown() in page.read_text()


class Config:
    """The options of a recipe that a pair's condition asks for."""

    def __init__(self, **options):
        self.__dict__.update(options)


@pytest.mark.parametrize("pair", unsupported.UNSUPPORTED)
def test_each_pair_is_refused_and_only_then(pair):
    condition = {pair.only_if[0]: pair.only_if[1][0]} if pair.only_if else {}
    for recipe in pair.recipes:
        assert recipe in RECIPES
        for value in pair.values:
            run = RunConfig(**{pair.option: value})
            with pytest.raises(ConfigError, match=f"{recipe} does not work with {pair.option}"):
                unsupported.check(recipe, run, Config(**condition))
            if pair.only_if:
                unsupported.check(recipe, run, Config(**{pair.only_if[0]: None}))
        unsupported.check(recipe, RunConfig(), Config(**condition))
    unsupported.check("single", RunConfig(**{pair.option: pair.values[0]}), Config(**condition))
