"""From a command line to the options of a run, and back to the words that each rank is started with."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.commands.run import LaunchOptions
from gptscale.launchers.run.options import option_words, parse_launch, parse_run


def test_recipe_options_stand_beside_the_runs_and_the_launchers():
    words = "--prefetch 3 --nproc 4 --lr 0.1 --dry-run".split()
    run, recipe, launch = parse_launch("fsdp", words, LaunchOptions)
    assert (recipe.prefetch, launch.nproc, launch.dry_run, run.lr) == (3, 4, True, 0.1)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 10**9), lr=st.none() | st.floats(0, 100), compile=st.booleans(), resume=st.sampled_from([None, "a b/c", "x;y"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "fp8"]), prefetch=st.integers(1, 9), reshard=st.booleans(),
)  # fmt: skip
def test_options_survive_the_way_to_the_workers(steps, lr, compile, resume, precision, prefetch, reshard):
    """What `gptscale run` parsed is what each rank parses from the words it is started with."""
    run = RunConfig(steps=steps, lr=lr, compile=compile, resume=resume, precision=precision)
    recipe = dataclasses.replace(parse_run("fsdp", [])[1], prefetch=prefetch, reshard_after_forward=reshard)
    assert parse_run("fsdp", option_words("fsdp", run, recipe)) == (run, recipe)
