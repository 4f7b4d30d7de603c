"""How operations are timed: all ranks at once, in turn with the others, again and again, and the median is kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gptscale.common.measure.speed import timed
from gptscale.common.process.world import gather_numbers

K = TypeVar("K", bound=Hashable)
# Least seconds of one timing, so that the clock's grain and a launch do not show.
ROUND_S = 0.004
WARM_UP = 2
REPEATS = 9


class Timing(NamedTuple):
    """The median seconds over repeats, as the mean of the ranks. spread: half the way between the quartiles, relative."""

    seconds: float
    spread: float
    repeats: int


def timings(calls: Mapping[K, Callable[[], object]], device: torch.device, repeats: int = REPEATS) -> dict[K, Timing]:
    """Time calls in turn, on all ranks at once, so that a disturbance hits one sample of each."""
    counts = {name: _count(call, device) for name, call in calls.items()}
    samples: dict[K, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            meet()
            samples[name].append(timed(call, counts[name], device))
    return summary(samples)


def meet() -> None:
    """Let ranks begin together."""
    if dist.is_initialized():
        dist.barrier()


def summary(samples: Mapping[K, Iterable[float]]) -> dict[K, Timing]:
    """Return the timing of each series of samples, as all ranks together saw it."""
    own = {name: sorted(series) for name, series in samples.items()}
    figures = [f for series in own.values() for f in (statistics.median(series), _quartiles(series))]
    ranks = gather_numbers(figures) if figures else [[]]
    means = [statistics.fmean(column) for column in zip(*ranks, strict=True)]
    pairs = zip(means[::2], means[1::2], strict=True)
    return {
        name: Timing(seconds, spread, len(series))
        for (name, series), (seconds, spread) in zip(own.items(), pairs, strict=True)
    }


def _quartiles(series: list[float]) -> float:
    n = len(series)
    return (series[(3 * n) // 4 if n > 1 else 0] - series[n // 4]) / 2 / statistics.median(series)


def _count(call: Callable[[], object], device: torch.device) -> int:
    """Return how many calls last ROUND_S: the same number on all ranks, since calls may be collectives."""
    for _ in range(WARM_UP):
        call()
    own = ROUND_S / max(timed(call, 1, device), 1e-7)
    return max(1, int(min(rank[0] for rank in gather_numbers([own]))))
