"""The causes of slowness that `gptscale bench verdict` puts into runs, and how each is taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gptscale.foresight.verdict.remedies import BUBBLE, CONTENDED, DATA, DISK, LATE, LAUNCH, LINKS, THREADS

HEALTHY = "healthy"
SHAPE = "--model tiny --n-embd 256 --data synthetic --no-tensorboard --lr 1e-4".split()


@dataclass(frozen=True)
class RecipeSizes:
    """How large a step of a recipe and each cause in it are, so that a cause costs at least as much as the rest of the step.

    options: of a step. healthy: what makes it one that hardly does anything but compute, None where no step is. read_s: of a
    batch. link_s: that a rank waits longer for each exchange, of which recipes have different numbers. nproc: ranks. small:
    further options of a step of many small micro-batches, None if these are bound by their exchanges and not by the host.
    few: options of a pipeline's step of few micro-batches, and of the one with enough of them.
    """

    options: str
    healthy: str | None
    read_s: float
    link_s: float
    nproc: int = 2
    small: str | None = None
    few: tuple[str, str] | None = None


# A step of some 100 ms.
BATCH = "--n-layer 1 --seq-len 128 --global-batch-size 8"
# Here exchanges of weights and gradients take less than a twentieth of the step, and so does the host.
LARGER = "--global-batch-size 64"
LARGEST = "--global-batch-size 128"
# With many micro-batches of one size there is hardly a bubble, with few of them it is a third of the step.
PIPELINE = "--n-layer 2 --seq-len 128 --micro-batch-size 1 --grad-accum-steps"
MANY, SOME, FEW = 24, 8, 2
# Each micro-batch costs the host of a stage some 3 ms, which are little beside 512 tokens.
LONGER = "--seq-len 512 --grad-accum-steps"
SMALL = "--n-layer 2 --seq-len 16 --n-embd 64 --global-batch-size 64"
# Threads of a rank that should have one.
THREADS_TOO_MANY = "32"
SIZES = {
    "ddp": RecipeSizes(BATCH, LARGER, read_s=0.25, link_s=0.06, small=""),
    # Without these options each micro-batch exchanges weights and gradients.
    "fsdp": RecipeSizes(BATCH, LARGEST, 0.25, 0.012, small="--no-sync-every-micro-batch --no-reshard-after-forward"),
    "zero2": RecipeSizes(BATCH, LARGEST, read_s=0.3, link_s=0.012),
    # On a CPU these sizes are bound by what tensor ranks exchange, so that no such run is healthy.
    "tensor_parallel": RecipeSizes(BATCH, None, read_s=0.3, link_s=0.012),
    "pipeline": RecipeSizes(
        f"{PIPELINE} {SOME}",
        f"{LONGER} {MANY}",
        read_s=0.4,
        link_s=0.01,
        few=(f"{LONGER} {FEW}", f"{LONGER} {SOME}"),
    ),
    # Two pairs of tensor ranks are two stages.
    "hybrid_3d": RecipeSizes(f"{PIPELINE} 4 --pp-size 2 --tp-size 2", None, read_s=1.0, link_s=0.005, nproc=4),
}
RECIPES = tuple(SIZES)
# Its four ranks share two processors, which limit it: no rank has one of its own, and no stage costs time by waiting.
CROWDED = ("hybrid_3d",)


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
        if sizes.healthy is not None:
            yield InjectedCase(HEALTHY, recipe, "", _setting(sizes, sizes.healthy))
        yield InjectedCase("slow reader", recipe, DATA, replace(base, injected={"read_s": sizes.read_s}), base)
        yield InjectedCase("slow link", recipe, LINKS, replace(base, injected={"link_s": sizes.link_s}), base)
        yield InjectedCase("machine in use", recipe, CONTENDED, replace(base, beside=None), base)
        if recipe not in CROWDED:
            pinned = replace(base, injected={"pinned": True})
            yield InjectedCase("slow rank", recipe, LATE, replace(pinned, beside=(sizes.nproc - 1,)), pinned)
            threads = replace(base, environment={"OMP_NUM_THREADS": THREADS_TOO_MANY})
            yield InjectedCase("wrong threads", recipe, THREADS, threads, base)
        if sizes.small is not None:
            small = (*SHAPE, *SMALL.split(), *sizes.small.split())
            slow, cured = (RunSetting((*small, name, "1")) for name in ("--micro-batch-size", "--grad-accum-steps"))
            yield InjectedCase("small micro-batch", recipe, LAUNCH, slow, cured)
        if sizes.few is not None:
            slow, cured = (_setting(sizes, options) for options in sizes.few)
            yield InjectedCase("few micro-batches", recipe, BUBBLE, slow, cured)
    base = RunSetting((*SHAPE, *BATCH.split()))
    yield InjectedCase("slow disk", "zero_infinity", DISK, replace(base, injected={"disk_s": 0.15}), base)


def _setting(sizes: RecipeSizes, more: str = "") -> RunSetting:
    return RunSetting((*SHAPE, *f"{sizes.options} {more}".split()), nproc=sizes.nproc)
