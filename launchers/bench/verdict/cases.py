"""The causes of slowness that `gptscale bench verdict` puts into runs, and how each is taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptscale.foresight.verdict.remedies import BUBBLE, CONTENDED, DATA, DISK, LATE, LAUNCH, LINKS, THREADS

RECIPES = ("ddp", "fsdp", "zero2", "tensor_parallel", "pipeline", "hybrid_3d")
HEALTHY = "healthy"
# One process per rank, on so many.
NPROC = 2
SHAPE = "--model tiny --n-embd 256 --data synthetic --no-tensorboard --lr 1e-4".split()
# With many micro-batches a pipeline has hardly a bubble.
PIPELINES = {"pipeline": [], "hybrid_3d": ["--pp-size", "2"]}
MICRO_BATCHES = 24
# On a CPU these sizes are bound by what tensor ranks exchange, so that no such run is healthy.
NEVER_HEALTHY = ("tensor_parallel",)
# Seconds that a rank waits longer for each exchange: recipes have different numbers of them.
LINK_S = {"ddp": 0.04, "fsdp": 0.01, "zero2": 0.03, "tensor_parallel": 0.005, "pipeline": 0.01, "hybrid_3d": 0.01}


@dataclass(frozen=True)
class RunSetting:
    """A run of a case.

    options: of gptscale run. injected: what its ranks do to themselves (worker.py). environment: variables of all ranks. beside:
    the processors on which another program runs, None for all of them.
    """

    options: tuple[str, ...]
    injected: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[int, ...] | None = ()


@dataclass(frozen=True)
class InjectedCase:
    """A cause in a recipe: the run that has it, the word that a verdict should say, and the run without it."""

    cause: str
    recipe: str
    word: str
    slow: RunSetting
    cured: RunSetting | None = None

    @property
    def name(self) -> str:
        return f"{self.cause.replace(' ', '-')}-{self.recipe}"


def cases() -> Iterator[InjectedCase]:
    """Yield every cause in every recipe that can have it."""
    for recipe in RECIPES:
        options = _options(recipe)
        quiet = RunSetting(options)
        if recipe not in NEVER_HEALTHY:
            yield InjectedCase(HEALTHY, recipe, "", quiet)
        yield InjectedCase("slow reader", recipe, DATA, RunSetting(options, {"read_s": 0.6}), quiet)
        yield InjectedCase("slow link", recipe, LINKS, RunSetting(options, {"link_s": LINK_S[recipe]}), quiet)
        pinned = {"pinned": True}
        yield InjectedCase(
            "slow rank", recipe, LATE, RunSetting(options, pinned, beside=(NPROC - 1,)), RunSetting(options, pinned)
        )
        yield InjectedCase("machine in use", recipe, CONTENDED, RunSetting(options, beside=None), quiet)
        yield InjectedCase(
            "wrong threads", recipe, THREADS, RunSetting(options, environment={"OMP_NUM_THREADS": "8"}), quiet
        )
        if recipe in PIPELINES:
            # Micro-batches of the same size, so that the number of them is all that differs.
            few = _options(recipe, micro_batches=2)
            yield InjectedCase("few micro-batches", recipe, BUBBLE, RunSetting(few), quiet)
        else:
            small = [*SHAPE, "--n-layer", "2", "--seq-len", "16", "--n-embd", "64", "--global-batch-size", "32"]
            one = RunSetting((*small, "--micro-batch-size", "1"))
            yield InjectedCase(
                "small micro-batch", recipe, LAUNCH, one, RunSetting((*small, "--grad-accum-steps", "1"))
            )
    options = _options("zero_infinity")
    yield InjectedCase("slow disk", "zero_infinity", DISK, RunSetting(options, {"disk_s": 0.2}), RunSetting(options))


def _options(recipe: str, micro_batches: int = MICRO_BATCHES) -> tuple[str, ...]:
    if recipe in PIPELINES:
        batch = f"--n-layer 2 --seq-len 256 --micro-batch-size 1 --grad-accum-steps {micro_batches}"
        return (*SHAPE, *PIPELINES[recipe], *batch.split())
    return (*SHAPE, *"--n-layer 1 --seq-len 128 --global-batch-size 32".split())
