"""The causes of slowness that `gptscale bench verdict` puts into runs, and how each is taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from gptscale.foresight.verdict.remedies import BUBBLE, CONTENDED, DATA, DISK, LATE, LAUNCH, LINKS, THREADS

HEALTHY = "healthy"
SHAPE = "--model tiny --n-embd 256 --data synthetic --no-tensorboard --lr 1e-4".split()


@dataclass(frozen=True)
class RecipeSizes:
    """How large a step of a recipe and each cause in it are, so that a cause costs at least as much as the rest of the step.

    options: of a step that only computes. read_s: of a batch. link_s: that a rank waits longer for each exchange, of which
    recipes have different numbers. threads: of each rank, too many. nproc: ranks. small: further options of a step of many small
    micro-batches, None if these are bound by their exchanges and not by the host. pinned: whether a rank can have a processor of
    its own.
    """

    options: str
    read_s: float
    link_s: float
    threads: int = 16
    nproc: int = 2
    small: str | None = ""
    pinned: bool = True


# A step of some 100 to 300 ms.
BATCH = "--n-layer 1 --seq-len 128 --global-batch-size 16"
# With many micro-batches a pipeline has hardly a bubble, with few it has one. They are of the same size.
PIPELINE = "--n-layer 2 --seq-len 256 --micro-batch-size 1 --grad-accum-steps"
MANY, FEW, MORE = 24, 2, 8
SIZES = {
    "ddp": RecipeSizes(BATCH, read_s=0.35, link_s=0.1),
    "fsdp": RecipeSizes(
        BATCH, read_s=0.35, link_s=0.03, small="--no-sync-every-micro-batch --no-reshard-after-forward"
    ),
    "zero2": RecipeSizes(BATCH, read_s=0.35, link_s=0.05),
    "tensor_parallel": RecipeSizes(BATCH, read_s=0.35, link_s=0.02, small=None),
    "pipeline": RecipeSizes(f"{PIPELINE} {MANY}", read_s=1.0, link_s=0.01, small=None),
    # Four ranks on two processors: these are what limits it, so that no stage costs time by waiting.
    "hybrid_3d": RecipeSizes(
        f"{PIPELINE} 4 --pp-size 2 --tp-size 2", read_s=1.0, link_s=0.01, nproc=4, small=None, pinned=False
    ),
}
RECIPES = tuple(SIZES)
PIPELINES = ("pipeline",)
# On a CPU these sizes are bound by what tensor ranks exchange, so that no such run is healthy.
NEVER_HEALTHY = ("tensor_parallel", "hybrid_3d")
SMALL = "--n-layer 2 --seq-len 16 --n-embd 64 --global-batch-size 64"


@dataclass(frozen=True)
class RunSetting:
    """A run of a case.

    options: of gptscale run. injected: what its ranks do to themselves (worker.py). environment: variables of all ranks. beside:
    the processors on which another program runs, None for all of them. nproc: its ranks.
    """

    options: tuple[str, ...]
    injected: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[int, ...] | None = ()
    nproc: int = 2


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
    for recipe, sizes in SIZES.items():
        base = _setting(sizes)
        if recipe not in NEVER_HEALTHY:
            yield InjectedCase(HEALTHY, recipe, "", base)
        yield InjectedCase("slow reader", recipe, DATA, _setting(sizes, injected={"read_s": sizes.read_s}), base)
        yield InjectedCase("slow link", recipe, LINKS, _setting(sizes, injected={"link_s": sizes.link_s}), base)
        if sizes.pinned:
            pinned = _setting(sizes, injected={"pinned": True})
            yield InjectedCase("slow rank", recipe, LATE, replace(pinned, beside=(sizes.nproc - 1,)), pinned)
        yield InjectedCase("machine in use", recipe, CONTENDED, replace(base, beside=None), base)
        threads = replace(base, environment={"OMP_NUM_THREADS": str(sizes.threads)})
        yield InjectedCase("wrong threads", recipe, THREADS, threads, base)
        if sizes.small is not None:
            small = (*SHAPE, *SMALL.split(), *sizes.small.split())
            slow, cured = (RunSetting((*small, name, "1")) for name in ("--micro-batch-size", "--grad-accum-steps"))
            yield InjectedCase("small micro-batch", recipe, LAUNCH, slow, cured)
        if recipe in PIPELINES:
            few, more = (_setting(sizes, f"--grad-accum-steps {n}") for n in (FEW, MORE))
            yield InjectedCase("few micro-batches", recipe, BUBBLE, few, more)
    base = _setting(RecipeSizes(BATCH, 0, 0))
    yield InjectedCase("slow disk", "zero_infinity", DISK, replace(base, injected={"disk_s": 0.2}), base)


def _setting(sizes: RecipeSizes, more: str = "", injected: Mapping[str, Any] = MappingProxyType({})) -> RunSetting:
    return RunSetting((*SHAPE, *f"{sizes.options} {more}".split()), injected, nproc=sizes.nproc)
