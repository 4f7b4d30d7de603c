"""Starting a run on this machine: check it, name it, launch its processes, and never leave it without a row."""

from __future__ import annotations

import dataclasses

import torch

from gptscale.common.process import environments
from gptscale.common.process.world import world_of
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run_config import RunConfig
from gptscale.launchers.run.options import option_words
from gptscale.launchers.run.preflight import Plan, preflight
from gptscale.launchers.run.record import new_run_id
from gptscale.recipes import get
from gptscale.results.record.files import append_summary
from gptscale.results.record.launch_with_row import launch_with_row


def default_nproc(recipe: str, config: RunConfig) -> int:
    """Return one process per visible GPU, but one on a CPU and one for a recipe that splits nothing."""
    return torch.cuda.device_count() if uses_cuda(config) and get(recipe).axes else 1


def uses_cuda(config: RunConfig) -> bool:
    """Return whether a run with these options uses GPUs."""
    return config.device != "cpu" and torch.cuda.is_available()


def plan_run(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int) -> Plan:
    """Resolve and check a run of `nproc` local processes before they start."""
    return preflight(recipe, config, recipe_config, world_of(config.device, config.dist_timeout_s, nproc))


def start(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int) -> int:
    """Check a run, launch it, wait for it, and return its exit status.

    A run whose rank 0 was killed gets its row from here.
    """
    plan_run(recipe, config, recipe_config, nproc)
    name = config.run_name or new_run_id(recipe)
    command = worker_command(recipe, dataclasses.replace(config, run_name=name), recipe_config)
    return launch_with_row(command, nproc, config.out / "runs" / name, config.out / "summary.csv", append_summary)


def worker_command(recipe: str, config: RunConfig, recipe_config: RecipeConfig) -> list[str]:
    """Return the command that each rank executes."""
    python = environments.python(get(recipe).environment)
    return [python, "-u", "-m", "gptscale.recipes", recipe, *option_words(recipe, config, recipe_config)]


def command_line(recipe: str, config: RunConfig, recipe_config: RecipeConfig, nproc: int) -> list[str]:
    """Return the command that starts the same run by hand, under torchrun."""
    row = get(recipe)
    starter = ["torchrun", "--standalone", "--nproc-per-node", str(nproc)] if row.axes else ["python"]
    if not environments.is_inside(row.environment):
        starter[0] = str(environments.folder(row.environment) / "bin" / starter[0])
    return [*starter, "-m", "gptscale.recipes", recipe, *option_words(recipe, config, recipe_config)]
