"""Runs as one rank of a world of CPUs sees them, without that world."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from gptscale.common.process.world import World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import preflight


def planned_words(recipe: str, words: Sequence[str], nproc: int, rank: int) -> tuple[Run, RecipeConfig]:
    """Return the run that the words of a command line mean, as one rank will see it, and the recipe's options."""
    config, recipe_config = parse_run(recipe, words)
    world = World(rank, rank, nproc, torch.device("cpu"), 60.0)
    with tempfile.TemporaryDirectory() as out:
        config = dataclasses.replace(config, data="synthetic", tokenizer="bytes", device="cpu", out=Path(out))
        return preflight(recipe, config, recipe_config, world).run, recipe_config
