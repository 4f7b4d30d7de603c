"""A row of a plan: a run with its predicted memory and time, and what limits it."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptscale.common.measure.gpus import GIB
from gptscale.common.recipe_config import RecipeConfig
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import AXIS_SIZES, MODEL_AXES
from gptscale.foresight.memory.bound import Places, bound
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.plan.question import Cluster
from gptscale.foresight.price.replay import Replayed
from gptscale.launchers.run.options import option_words
from gptscale.recipes import get

# The bound was at most 12 % below the allocated bytes of 255 simulated ranks (docs/measurements/LOG.md, 2026-11-25).
ALLOWANCE = 1.15


Split = tuple[str, *tuple[int, ...]]


@dataclass(frozen=True)
class Tried:
    """What a trial of a row told: the seconds of a step, between which they are expected, and the memory.

    grade: how they are known. bound_by: what takes the largest part of the step, with its share. memory: of the rank that needs
    most. replayed: of each rank that was simulated, what its streams do when. parts: seconds of the slowest, by what they go to.
    """

    seconds: float
    low: float
    high: float
    grade: str
    bound_by: str = ""
    mfu: float | None = None
    memory: RankMemory | None = None
    replayed: Mapping[int, Replayed] = field(default_factory=dict, repr=False, compare=False)
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRow:
    """A run on a cluster.

    config: the recipe's own options. places: the bound of its memory. estimate: seconds that its step lasts at least. tried: what
    a trial told, if there was one.
    """

    run: Run
    config: RecipeConfig
    cluster: Cluster
    places: Places
    estimate: float
    tried: Tried | None = None

    @property
    def split(self) -> Split:
        """Return what rows of one kind have in common: the recipe and its mesh."""
        return self.run.recipe, *map(self.run.mesh.size, MODEL_AXES)

    @property
    def simulated(self) -> RankMemory | None:
        """Return its memory under the mock of CUDA, if it was simulated."""
        return self.tried.memory if self.tried else None

    @property
    def timing(self) -> Tried:
        assert self.tried is not None
        return self.tried

    @property
    def name(self) -> str:
        """Return the recipe and all that splits or saves memory, in few words."""
        run, config = self.run, self.config
        words = [run.recipe]
        words += [f"{axis}{size}" for axis in MODEL_AXES if (size := run.mesh.size(axis)) > 1]
        if run.batch.dp_size > 1:
            words.append(f"dp{run.batch.dp_size}")
        own = {
            "schedule": getattr(config, "schedule", "") if run.pp_size > 1 else "",
            "style": getattr(config, "cp_style", "") if run.cp_size > 1 else "",
            "data": getattr(config, "data_parallel", "") if run.batch.dp_size > 1 else "",
            "strategy": getattr(config, "strategy", ""),
            "stage": f"stage {config.stage}"
            if hasattr(config, "stage") and "stage" not in get(run.recipe).preset
            else "",
            "reshard": "" if getattr(config, "reshard_after_forward", True) else "kept",
            "hsdp": f"hsdp{n}" if (n := getattr(config, "dp_replicate_size", 1)) > 1 else "",
            "stages": f"x{n}" if (n := getattr(config, "stages_per_rank", 0)) > 2 else "",
            "state": "host state" if getattr(config, "offload_optim_frac", 0) else "",
        }
        words += [word for word in own.values() if word]
        return " ".join(words)

    @property
    def detail(self) -> str:
        """Return the micro-batches and the checkpointing."""
        batch, mode = self.run.batch, self.run.config.activation_checkpointing
        return f"{batch.micro_batch_size} x {batch.grad_accum_steps}" + ("" if mode == "none" else f" {mode}")

    @property
    def needed(self) -> int:
        """Return the bytes that a device must hold, by the simulation if there is one."""
        if self.simulated is not None:
            return self.simulated.needed
        return self.places.on_device + self.cluster.outside(communicators(self.run))

    @property
    def margin(self) -> int:
        """Return the bytes of the device that remain, below 0 if it is too small."""
        return self.cluster.memory - self.needed

    @property
    def may_fit(self) -> bool:
        """Return whether it fits as far as is known."""
        return self.margin >= 0 and (self.simulated is None or not self.simulated.is_too_large)

    @property
    def surely_fits(self) -> bool:
        """Return whether it fits by a simulation, or by the bound with an allowance for what that leaves out."""
        if self.simulated is not None:
            return self.may_fit
        return ALLOWANCE * self.places.on_device + self.needed - self.places.on_device <= self.cluster.memory

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of all devices together."""
        return self.run.tokens_per_step / self.timing.seconds

    def memory_words(self) -> str:
        """Return what fills the peak, the largest kinds with their GiB."""
        kinds = Counter[str]()
        for owner, nbytes in (self.places.device if self.simulated is None else self.simulated.at_peak()).items():
            kinds[KINDS_OF_MEMORY.get(owner, "rest")] += nbytes
        words = [f"{kind} {_gib(nbytes)}" for kind, nbytes in kinds.most_common(3)]
        words += [f"host {self.places.host / GIB:.0f}"] if self.places.host else []
        words += [f"disk {self.places.disk / GIB:.0f}"] if self.places.disk else []
        return ", ".join(words)


def places_of(run: Run, config: RecipeConfig) -> Places:
    """Return the bound of the rank that needs most: the first, or of stages the last, which has the logits."""
    ranks = (0, run.world.world_size - 1) if run.pp_size > 1 else (0,)
    places = (bound(replace(run, world=replace(run.world, rank=rank)), config) for rank in ranks)
    return max(places, key=lambda of_rank: of_rank.on_device)


def communicators(run: Run) -> int:
    """Return how many groups of ranks talk through NCCL: the world, and one for each axis that is split beside another."""
    axes = sum(size > 1 for size in run.mesh.sizes.values())
    return 0 if run.world.world_size == 1 else max(1, axes + (axes > 1))


def _gib(nbytes: int) -> str:
    """Return GiB with one decimal, or with one figure if they are less."""
    return f"{nbytes / GIB:.1f}" if nbytes >= 0.1 * GIB else f"{nbytes / GIB:.1g}"


KINDS_OF_MEMORY = {
    "parameter": "weights", "gathered shard": "gathered", "gradient": "gradients", "bucket": "gradients",
    "optimizer state": "optimizer", "activation": "activations", "logits and loss": "logits",
    "under way in backward": "backward",
}  # fmt: skip


def words_of(row: PlannedRow) -> list[str]:
    """Return the command line of a row behind its recipe, without how many processes it has."""
    run, recipe = row.run, get(row.run.recipe)
    own_place: dict[str, Any] = dict.fromkeys(AXIS_SIZES)
    own_place |= {f"{axis}_size": run.mesh.size(axis) for axis in recipe.axes if axis != "dp"}
    own_place["device"] = "cpu" if row.cluster.is_cpu else "auto"
    config = dataclasses.replace(run.config, micro_batch_size=run.batch.micro_batch_size, **own_place)
    return option_words(run.recipe, config, row.config)


def command_of(row: PlannedRow) -> str:
    """Return the command that starts a row: a run, or a job if there are several nodes."""
    recipe, cluster = row.run.recipe, row.cluster
    start = ["gptscale", "run", recipe, "--nproc", str(cluster.ranks)]
    if cluster.nodes > 1:
        start = ["gptscale", "submit", recipe, "--nodes", str(cluster.nodes), "--gpus-per-node", str(cluster.per_node)]
    return shlex.join([*start, *words_of(row)])
