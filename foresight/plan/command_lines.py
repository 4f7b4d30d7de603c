"""The command line that starts a row of a plan."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

from gptscale.common.settings.command_line import changed_options
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.recipes import get


def words_of(row: PlannedRow) -> list[str]:
    """Return the command line of a row behind its recipe, without how many processes it has."""
    run, recipe = row.candidate.run, get(row.candidate.run.recipe)
    axes = ("tp", "pp")
    own_place: dict[str, Any] = {
        f"{axis}_size": getattr(run, f"{axis}_size") if axis in recipe.axes else None for axis in axes
    }
    own_place["device"] = "cpu" if row.cluster.is_cpu else "auto"
    config = dataclasses.replace(run.config, micro_batch_size=run.batch.micro_batch_size, **own_place)
    own = row.candidate.config
    return changed_options(config, RunConfig()) + changed_options(own, type(own)(**recipe.preset))


def command_of(row: PlannedRow) -> str:
    """Return the command that starts a row: a run, or a job if there are several nodes."""
    recipe, cluster = row.candidate.run.recipe, row.cluster
    start = ["gptscale", "run", recipe, "--nproc", str(cluster.ranks)]
    if cluster.nodes > 1:
        start = ["gptscale", "submit", recipe, "--nodes", str(cluster.nodes), "--gpus-per-node", str(cluster.per_node)]
    return shlex.join([*start, *words_of(row)])
