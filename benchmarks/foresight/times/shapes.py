"""The shapes of `python -m benchmarks.foresight.times`, and the plan of a run of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World
from gptscale.common.settings.checks import did_you_mean
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import ReadyRun, preflight

# Small enough that a step lasts tens of milliseconds. None has the depths that layers are timed at.
SHAPES: dict[str, dict[str, int]] = {
    "narrow": {"n_embd": 128, "n_head": 4, "n_layer": 4, "seq_len": 128},
    "wide": {"n_embd": 256, "n_head": 4, "n_layer": 2, "seq_len": 64},
    "deep": {"n_embd": 192, "n_head": 6, "n_layer": 6, "seq_len": 64},
}
GLOBAL_BATCH = 8


def shape_named(name: str) -> dict[str, int]:
    """Return a shape, or raise ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"unknown shape {name!r}", "in --shapes", did_you_mean(name, SHAPES))
    return SHAPES[name]


def plan_of(recipe: str, shape: dict[str, Any], steps: int, folder: Path, world: World) -> ReadyRun:
    """Return the plan of a run of a shape by a recipe, as the command line makes it."""
    options = {
        "model": "tiny",
        "data": "synthetic",
        "device": "cpu",
        "out": folder,
        "steps": steps,
        "global_batch_size": GLOBAL_BATCH,
    }
    words = [word for name, value in (options | shape).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config, recipe_config = parse_run(recipe, [*words, "--lr-schedule", "constant", "--no-tensorboard"])
    return preflight(recipe, config, recipe_config, world)
