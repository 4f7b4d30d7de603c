"""Starting a run on this machine: check it, name it, launch its processes, and never leave it without a row."""

from __future__ import annotations

import dataclasses
import sys

import torch

from gptscale.common.errors import ConfigError
from gptscale.common.process import environments
from gptscale.common.process.program import Program
from gptscale.common.process.world import runs_on_cuda, world_of
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.finished import is_finished
from gptscale.launchers.run.options import default_recipe_config, option_words
from gptscale.launchers.run.preflight import ReadyRun, preflight, why_not_here
from gptscale.launchers.run.record import new_run_id
from gptscale.launchers.run.space import check_memory, check_space
from gptscale.launchers.run.verdict import tell_verdict
from gptscale.recipes import RECIPES, get, unsupported
from gptscale.results.columns import SUMMARY
from gptscale.results.record.launch_with_row import launch_with_row


def default_nproc(recipe: str, config: RunConfig) -> int:
    """Return one process per visible GPU, but one on a CPU and one for a recipe that splits nothing."""
    return torch.cuda.device_count() if runs_on_cuda(config.device) and get(recipe).axes else 1


def recipes_named(names: str, config: RunConfig, *, same_work: bool = False) -> list[str]:
    """Return the recipes in `names`, which has commas between them.

    `all` means those that can run on the run's device and with its options. The others are printed with the reason. same_work:
    leave out of `all` the exercise's baseline, which without options does other work than the others.
    """
    if names != "all":
        return parse_names(names, RECIPES, "recipe", "--recipes")
    recipes = []
    for name in RECIPES:
        reason = (RECIPES[name].own_work if same_work else "") or why_not_here(name, cuda=runs_on_cuda(config.device))
        try:
            unsupported.check(name, config, default_recipe_config(name))
        except ConfigError as error:
            reason = reason or error.what.removeprefix(f"{name} ")
        if reason:
            print(f"leaving out {name}: {reason}", file=sys.stderr)
        else:
            recipes.append(name)
    return recipes


def nproc_of(recipe: str, config: RunConfig, nproc: int | None) -> int:
    """Return how many processes a recipe gets when several recipes do the same work: one if it splits nothing."""
    if not get(recipe).axes:
        return 1
    return nproc or (default_nproc(recipe, config) if runs_on_cuda(config.device) else 2)


def plan_run(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int) -> ReadyRun:
    """Resolve and check a run of `nproc` local processes before they start."""
    return preflight(recipe, config, recipe_config, world_of(config.device, config.dist_timeout_s, nproc))


def start(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int) -> int:
    """Check a run, launch it, wait for it, and return its exit status.

    A run whose rank 0 was killed gets its row from here, and one that ended well its verdict.
    """
    ready = plan_run(recipe, config, recipe_config, nproc)
    name = config.run_name or new_run_id(recipe)
    folder = config.out / "runs" / name
    if is_finished(ready, folder):
        return 0
    check_memory(ready.run, recipe_config.offload)
    check_space(ready.run, folder)
    row, config = get(recipe), dataclasses.replace(config, run_name=name)
    words = (recipe, *option_words(recipe, config, recipe_config))
    program = Program("gptscale.recipes", words, row.environment, imports=row.imports)
    status = launch_with_row(program, nproc, folder, SUMMARY, fork=not runs_on_cuda(config.device))
    if status == 0:
        tell_verdict(folder)
    return status


def command_line(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int) -> list[str]:
    """Return the command that starts the same run by hand, under torchrun."""
    row = get(recipe)
    starter = ["torchrun", "--standalone", "--nproc-per-node", str(nproc)] if row.axes else ["python"]
    if not environments.is_inside(row.environment):
        starter[0] = str(environments.folder(row.environment) / "bin" / starter[0])
    return [*starter, "-m", "gptscale.recipes", recipe, *option_words(recipe, config, recipe_config)]
