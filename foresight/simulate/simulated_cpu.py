"""The memory of one rank on CPUs of a world that is not started, counted in a process of its own, or by arithmetic."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.task import LIMIT_S, reason
from gptscale.common.process.warm_parent import run_captured
from gptscale.common.process.world import DEFAULT_TIMEOUT_S, World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.memory.closed_form import predict
from gptscale.foresight.memory.owners import GRADIENT, PARAMETER, STATE
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.saved import load_timeline
from gptscale.foresight.memory.timeline import Allocations, Timeline
from gptscale.launchers.run.options import option_words, parse_run
from gptscale.launchers.run.preflight import preflight
from gptscale.recipes import get

# Of the memory that is free, what a count may take.
COUNT_SHARE = 0.7
# Floating-point operations that a count may take: about a minute of one core.
COUNT_FLOP = 3e12


def simulate(
    recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int, rank: int, how: str = "auto"
) -> RankMemory:
    """Return the memory of one rank.

    how: count, formula, or auto, which counts what this machine can hold and compute in about a minute.
    """
    run = planned(recipe, config, recipe_config, nproc, rank)
    predicted = predict(run, recipe_config)
    why = too_large(run, sum(predicted.values())) if how == "auto" else None
    extra: dict[str, Any] = {"device": "cpu", "closed_form_bytes": predicted}
    if how != "formula" and not why:
        try:
            facts, timeline = count(run, recipe_config)
        except GptscaleError as error:
            if how == "count":
                raise
            why = error.what.partition(". ")[0][:150]
    if how == "formula" or why:
        if get(recipe).engine == "transformers":
            what = f"there is no closed form of transformers' model{f', and {why}' if why else ''}"
            raise ConfigError(what, "in --how", "use --device cuda, which counts it under a mock")
        timeline = at_one_moment(predicted)
        extra["grade"] = f"closed form: {why}" if why else "closed form"
        state = {name: predicted.get(name, 0) for name in (PARAMETER, GRADIENT, STATE)}
    else:
        extra["grade"] = "counted: the rank's own program ran, beside peers that do not exist"
        state = {PARAMETER: facts["parameters"], GRADIENT: facts["gradients"], STATE: facts["optimizer_state"]}
    extra["state_bytes"] = state
    return RankMemory(rank, timeline, timeline.peak, timeline.peak, extra=extra)


def at_one_moment(owners: dict[str, int]) -> Timeline:
    """Return a timeline of the peak alone."""
    n = len(owners)
    sizes = np.array(list(owners.values()), dtype=np.int64)
    allocations = Allocations(np.zeros(n, np.int64), np.ones(n, np.int64), sizes, list(owners))
    return Timeline(allocations, 1, [], [0])


def planned(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int, rank: int) -> Run:
    """Return the run as this rank will see it, or raise ConfigError for what cannot run."""
    world = World(rank, rank, nproc, torch.device("cpu"), DEFAULT_TIMEOUT_S["cpu"])
    if get(recipe).needs_cuda:
        raise ConfigError(f"{recipe} needs a CUDA device", "in --device cpu", "use --device cuda, which simulates one")
    if config.compile:
        what = "compiled blocks choose at compile time what they keep, which is not simulated on CPUs"
        raise ConfigError(what, "in --compile", "leave it out: without it the memory is an upper bound")
    with tempfile.TemporaryDirectory() as out:
        plain = dataclasses.replace(
            config, data="synthetic", tokenizer="bytes", device="cpu", out=Path(out), resume=None
        )
        return preflight(recipe, plain, recipe_config, world).run


def planned_words(recipe: str, words: Sequence[str], nproc: int, rank: int) -> tuple[Run, RecipeConfig]:
    """Return the run that the words of a command line mean, as one rank will see it, and the recipe's options."""
    config, recipe_config = parse_run(recipe, words)
    return planned(recipe, config, recipe_config, nproc, rank), recipe_config


def of_closed_form(recipe: str, words: Sequence[str], nproc: int, rank: int) -> tuple[int, int]:
    """Return the bytes of the peak, and of the state alone, by arithmetic."""
    predicted = predict(*planned_words(recipe, words, nproc, rank))
    return sum(predicted.values()), sum(predicted.get(name, 0) for name in (PARAMETER, STATE))


def too_large(run: Run, nbytes: float) -> str | None:
    """Return why this machine cannot count a rank of this run, or None if it can."""
    free = psutil.virtual_memory().available
    if nbytes > COUNT_SHARE * free:
        return f"to count it takes {nbytes / 2**30:,.1f} GiB, {free / 2**30:,.1f} are free here"
    tokens = run.batch.sequences_per_rank * run.seq_len
    flop = 2 * 6 * tokens * run.gpt.n_matmul_params / (run.tp_size * run.pp_size)
    return f"to count it takes {flop / 1e12:,.0f} TFLOP" if flop > COUNT_FLOP else None


def count(run: Run, recipe_config: RecipeConfig) -> tuple[dict[str, Any], Timeline]:
    """Run the rank's own program under peers that do not exist, in its recipe's environment, and return what was counted."""
    row, rank = get(run.recipe), run.world.rank
    words = option_words(run.recipe, run.config, recipe_config)
    with tempfile.TemporaryDirectory() as folder:
        target = (folder, "fake", json.dumps([(run.recipe, words)]))
        program = Program("gptscale.launchers.bench.memory.counted", target, row.environment)
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.world.world_size}
        variables |= {"LOCAL_WORLD_SIZE": run.world.world_size, "OMP_NUM_THREADS": 1}
        environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        ended = run_captured(program, timeout=LIMIT_S, environ=environ, fork=False)
        if ended.returncode:
            errors = [line for line in ended.stderr.splitlines() if line.startswith("gptscale: error: ")]
            what = (errors or [reason(ended.stderr)])[-1].removeprefix("gptscale: error: ")
            raise GptscaleError(
                f"{run.recipe} does not run under fake peers ({what[:200]})", "here", "use --how formula"
            )
        stem = Path(folder) / f"fake-0-{rank}"
        return json.loads(stem.with_suffix(".json").read_text()), load_timeline(stem.with_suffix(".npz"))
