"""The pairs that do not work are refused, and the docs have the same table."""

from pathlib import Path

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World
from gptscale.common.settings.batch_plan import plan_batch
from gptscale.common.settings.checks import option_of
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes import RECIPES, unsupported
from gptscale.recipes.fairscale_fsdp import FairscaleFSDPConfig


def as_markdown():
    """Return the table for docs/recipes/unsupported.md."""
    lines = ["| recipes | option | values | why | instead |", "| --- | --- | --- | --- | --- |"]
    for pair in unsupported.UNSUPPORTED:
        names = ", ".join(f"`{name}`" for name in pair.recipes)
        if pair.only_if:
            field, conditions = pair.only_if
            names += f" with `{option_of(field)} {' or '.join(map(str, conditions))}`"
        values = ", ".join(f"`{value}`" for value in pair.values)
        lines.append(f"| {names} | `{option_of(pair.option)}` | {values} | {pair.why} | {pair.instead} |")
    return "\n".join(lines) + "\n"


def test_the_docs_have_the_same_table():
    page = Path(__file__).parents[2] / "docs" / "recipes" / "unsupported.md"
    assert as_markdown() in page.read_text()


class Config:
    """The options of a recipe that a pair's condition asks for."""

    def __init__(self, **options):
        self.__dict__.update(options)


@pytest.mark.promise("C11 | pairs that do not work | refused by a table, which is in the pages")
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


def test_fairscales_fsdp_on_one_rank_does_not_accumulate_in_16_bits():
    def check(precision, micro_batch_size):
        config, world = RunConfig(precision=precision), World(0, 0, 1, torch.device("cpu"), 60.0)
        batch = plan_batch(1, global_batch_size=8, micro_batch_size=micro_batch_size)
        FairscaleFSDPConfig().check(Run("fairscale_fsdp", config, config.gpt(), batch, world))

    check("fp32", 4)
    check("bf16", 8)
    with pytest.raises(ConfigError, match="one rank cannot accumulate in 16 bits"):
        check("bf16", 4)
