"""Every way of doing a piece of work that the recipes themselves accept."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from gptscale.common.errors import ConfigError
from gptscale.common.process.world import World
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.plan.question import Cluster
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import RECIPES, Recipe, unsupported

# Ways to keep activations for backward, the fastest first. Who has memory for one gains nothing by the next.
CHECKPOINTING: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
# Options of recipes that split the work otherwise. A field whose type lists its values takes all of them.
LISTED = ("schedule", "data_parallel", "strategy", "cp_style")
STAGES = (1, 2, 3)
# A run that its recipe accepts, with the recipe's own options.
Candidate = tuple[Run, RecipeConfig]


def enumerate_runs(
    config: RunConfig, cluster: Cluster, recipes: Sequence[str]
) -> tuple[list[list[Candidate]], dict[str, str]]:
    """Return the valid runs in groups that differ in checkpointing alone, its fastest form first, and why recipes have none."""
    groups, left_out = list[list[Candidate]](), dict[str, str]()
    for name in recipes:
        row = RECIPES[name]
        if why := row.own_work or "it needs a CUDA device" * (row.needs_cuda and cluster.is_cpu):
            left_out[name] = why
            continue
        try:
            kind = getattr(row.load(), row.config)
        except ConfigError as error:
            left_out[name] = f"{error.what}: {error.fix}"
            continue
        before, why = len(groups), ""
        for request, options in _requests(config, cluster, row, kind):
            group = []
            for mode in CHECKPOINTING:
                try:
                    run = valid_run(name, dataclasses.replace(request, activation_checkpointing=mode), options, cluster)
                except ConfigError as error:
                    why = why or f"{error.what} ({error.where})"
                    continue
                group.append((run, options))
            if group:
                groups.append(group)
        if len(groups) == before:
            alone, wide = (
                f"it is one process, not {cluster.ranks}",
                f"its tensor ranks would span nodes of {cluster.per_node}",
            )
            left_out[name] = why or {(): alone, ("tp",): wide}.get(row.axes, "no option of it fits")
    return groups, left_out


def valid_run(recipe: str, config: RunConfig, own: RecipeConfig, cluster: Cluster) -> Run:
    """Return a run on a cluster. Raises ConfigError if its options do not work out."""
    device = torch.device("cpu" if cluster.is_cpu else "cuda")
    run = resolve(recipe, config, own, World(0, 0, cluster.ranks, device, 600.0))
    unsupported.check(recipe, run.config, own)
    if own.offload != "nvme":
        # A check of nvme would look at this machine's disk.
        own.check(run)
    return run


def _requests(
    config: RunConfig, cluster: Cluster, row: Recipe, kind: type[RecipeConfig]
) -> Iterator[tuple[RunConfig, RecipeConfig]]:
    """Yield options of the run and of the recipe, many of which the recipe will refuse."""
    options = list(_options(row, kind, cluster))
    for sizes in _meshes(cluster, row.axes):
        sequences = (config.global_batch_size or 1) // (cluster.ranks // math.prod(sizes.values()))
        for exponent in range(max(1, sequences).bit_length()):
            if sequences % 2**exponent == 0 or exponent == 0:
                batch: dict[str, Any] = {"micro_batch_size": 2**exponent, "grad_accum_steps": None}
                for own in options:
                    yield dataclasses.replace(config, **sizes, **batch), own


def _meshes(cluster: Cluster, axes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield sizes of the axes beside data ranks. Tensor ranks stay in a node. Sequences are not cut beside two other axes."""
    n = cluster.ranks
    divisors = [size for size in range(1, n + 1) if n % size == 0]
    tensor = [size for size in divisors if size <= cluster.per_node or n == 1]
    listed = {"tp": tensor, "cp": divisors if len(axes) < 4 else [1], "pp": divisors}
    names = [axis for axis in listed if axis in axes]
    for sizes in itertools.product(*(listed[name] for name in names)):
        ranks = math.prod(sizes)
        # Without such ranks it is what the recipes of one axis do.
        if n % ranks or ("dp" not in axes and ranks != n) or (len(axes) > 1 and ranks == 1 and n > 1):
            continue
        yield {f"{name}_size": size for name, size in zip(names, sizes, strict=True)}


def _options(row: Recipe, kind: type[RecipeConfig], cluster: Cluster) -> Iterator[RecipeConfig]:
    """Yield a recipe's own options in all the ways that split the work otherwise."""
    types = typing.get_type_hints(kind)
    values: dict[str, Sequence[Any]] = {
        **{name: typing.get_args(types[name]) for name in LISTED if name in types},
        "stage": typing.get_args(types.get("stage")) or STAGES,
        "reshard_after_forward": (True, False),
        # shards inside a node, replicas between nodes
        "dp_replicate_size": sorted({1, cluster.nodes}),
        "stages_per_rank": (0, 4),
        "offload_optim_frac": (0.0, 1.0),
    }
    own = [field.name for field in dataclasses.fields(kind) if field.name in values and field.name not in row.preset]
    for chosen in itertools.product(*(values[name] for name in own)):
        try:
            yield kind(**row.preset, **dict(zip(own, chosen, strict=True)))
        except ConfigError:
            continue
