"""A row of a plan: a run with its predicted memory and time, and what limits it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from gptscale.common.measure.devices import peak_tflops
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.foresight.memory.bound import Places, bound
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.mock_cuda.devices import DEVICES
from gptscale.foresight.plan.enumeration import Candidate
from gptscale.foresight.plan.question import GIB, Cluster
from gptscale.foresight.time.simulator import PlayedStep
from gptscale.recipes import get

# Of 255 ranks that were simulated, the bound was at worst 12 % below what was allocated (docs/measurements/LOG.md, 2026-11-25).
ALLOWANCE = 1.15
# 90 % of a normal distribution lies within so many standard deviations.
NINETY_PERCENT = 1.645


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step. spread: relative standard deviation. refused: why there are none.

    bound_by: what makes the step shortest if it is taken away; gain: the share that it then is shorter.
    """

    seconds: float = math.inf
    spread: float = 0.0
    grade: str = ""
    refused: str = ""
    played: PlayedStep | None = field(default=None, repr=False, compare=False)
    bound_by: str = ""
    gain: float = 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the seconds between which 90 % of such steps are expected."""
        width = math.exp(NINETY_PERCENT * self.spread)
        return self.seconds / width, self.seconds * width


@dataclass(frozen=True)
class PlannedRow:
    """A candidate on a cluster. simulated: its memory under the mock of CUDA, if that was asked."""

    candidate: Candidate
    cluster: Cluster
    places: Places
    timing: StepTime = StepTime()
    simulated: RankMemory | None = None

    @property
    def name(self) -> str:
        """Return the recipe and all that splits or saves memory, in few words."""
        run, config = self.candidate.run, self.candidate.config
        words = [run.recipe]
        words += [f"{axis}{size}" for axis, size in (("tp", run.tp_size), ("pp", run.pp_size)) if size > 1]
        if run.batch.dp_size > 1:
            words.append(f"dp{run.batch.dp_size}")
        own = {
            "schedule": getattr(config, "schedule", "") if run.pp_size > 1 else "",
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
        batch, mode = self.candidate.run.batch, self.candidate.run.config.activation_checkpointing
        return f"{batch.micro_batch_size} x {batch.grad_accum_steps}" + ("" if mode == "none" else f" {mode}")

    @property
    def needed(self) -> int:
        """Return the bytes that a device must hold, by the simulation if there is one."""
        if self.simulated is not None:
            return self.simulated.needed
        return self.places.on_device + self.cluster.outside(communicators(self.candidate))

    @property
    def margin(self) -> int:
        """Return the bytes of the device that remain, below 0 if it is too small."""
        return self.cluster.memory - self.needed

    @property
    def may_fit(self) -> bool:
        """Return whether it fits as far as is known."""
        return self.margin >= 0 and (self.simulated is None or self.simulated.fits is not False)

    @property
    def surely_fits(self) -> bool:
        """Return whether it fits by a simulation, or by the bound with an allowance for what that leaves out."""
        if self.simulated is not None:
            return self.may_fit
        return ALLOWANCE * self.places.on_device + self.needed - self.places.on_device <= self.cluster.memory

    @property
    def tokens_per_s(self) -> float:
        """Return the predicted tokens a second of all devices together, 0 without a time."""
        return self.candidate.run.tokens_per_step / self.timing.seconds

    @property
    def mfu(self) -> float | None:
        """Return the predicted share of the devices' peak rate, None on a CPU and without a time."""
        run = self.candidate.run
        if self.cluster.is_cpu or self.timing.refused:
            return None
        peak = peak_tflops(DEVICES[self.cluster.device].name, run.config.precision)
        per_device = self.tokens_per_s * model_flops_per_token(run.gpt, run.seq_len) / self.cluster.ranks
        return per_device / (peak * 1e12) if peak else None

    def memory_words(self, most: int = 3) -> str:
        """Return what fills the peak, the largest kinds with their GiB."""
        kinds: dict[str, int] = {}
        owners = self.places.device
        if self.simulated is not None:
            owners = self.simulated.timeline.by_owner(self.simulated.timeline.peak_at)
        for owner, nbytes in owners.items():
            kind = KINDS_OF_MEMORY.get(owner.partition(" of ")[0], "rest")
            kinds[kind] = kinds.get(kind, 0) + nbytes
        largest = sorted(kinds.items(), key=lambda item: -item[1])[:most]
        words = [f"{kind} {_gib(nbytes)}" for kind, nbytes in largest]
        words += [f"host {self.places.host / GIB:.0f}"] if self.places.host else []
        words += [f"disk {self.places.disk / GIB:.0f}"] if self.places.disk else []
        return ", ".join(words)


def places_of(candidate: Candidate) -> Places:
    """Return the bound of the rank that needs most: the first, or of stages the last, which has the logits."""
    run, config = candidate.run, candidate.config
    ranks = (0, run.world.world_size - 1) if run.pp_size > 1 else (0,)
    places = (bound(replace(run, world=replace(run.world, rank=rank)), config) for rank in ranks)
    return max(places, key=lambda of_rank: of_rank.on_device)


def communicators(candidate: Candidate) -> int:
    """Return how many groups of ranks talk through NCCL: the world, and one for each axis that is split beside another."""
    run = candidate.run
    axes = sum(size > 1 for size in (run.tp_size, run.pp_size, run.batch.dp_size))
    return 0 if run.world.world_size == 1 else max(1, axes + (axes > 1))


def _gib(nbytes: int) -> str:
    """Return GiB with one decimal, or with one figure if they are less."""
    return f"{nbytes / GIB:.1f}" if nbytes >= 0.1 * GIB else f"{nbytes / GIB:.1g}"


KINDS_OF_MEMORY = {
    "parameter": "weights",
    "gathered shard": "gathered",
    "gradient": "gradients",
    "bucket": "gradients",
    "optimizer state": "optimizer",
    "activation": "activations",
    "logits and loss": "logits",
    "under way in backward": "backward",
}
