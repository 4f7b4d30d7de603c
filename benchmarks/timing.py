"""The one timer of the benches, and the rate of copying, a ceiling measured with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import torch

from gptscale.common.measure.speed import timed

K = TypeVar("K", bound=Hashable)

# bytes of each tensor of a copy: far beyond the caches
COPY_BYTES = {"cpu": 2**28, "cuda": 2**31}
REPEATS = 7
# least seconds of one timing, so that the clock's grain, a launch and a thread's waking do not show
ROUND_S = 0.02


def calls_per_round(call: Callable[[], object], device: torch.device) -> int:
    """Return how many calls last ROUND_S, from the second call (the first one warms up)."""
    timed(call, 1, device)
    return max(1, int(ROUND_S / max(timed(call, 1, device), 1e-7)))


def medians(calls: Mapping[K, Callable[[], object]], device: torch.device) -> dict[K, float]:
    """Return the median seconds of one call of each.

    All calls run in turn, again and again, so that a disturbance hits one sample of each.
    """
    counts = {name: calls_per_round(call, device) for name, call in calls.items()}
    rounds = [{name: timed(call, counts[name], device) for name, call in calls.items()} for _ in range(REPEATS)]
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in calls}


def rounds_in_changing_order(
    calls: Mapping[K, Callable[[], object]], device: torch.device, n_rounds: int
) -> Iterator[dict[K, float]]:
    """Yield the seconds of one call of each, round by round, the first two calls in the other order every second round.

    Each turn follows a call that is not timed, so that no call finds the caches as another one left them.
    """
    counts = {name: calls_per_round(call, device) for name, call in calls.items()}
    first, second, *rest = calls
    for i in range(n_rounds):
        order = [second, first, *rest] if i % 2 else list(calls)
        seconds = {}
        for name in order:
            timed(calls[name], 1, device)
            seconds[name] = timed(calls[name], counts[name], device)
        yield seconds


def copy_call(device: torch.device, nbytes: int | None = None) -> tuple[Callable[[], object], int]:
    """Return a copy of one tensor into another as STREAM has it, and the bytes that it moves, read plus write.

    nbytes: of one tensor; default COPY_BYTES. Source: McCalpin 1995, "Memory Bandwidth and Machine Balance".
    """
    source = torch.empty(max(1, (nbytes or COPY_BYTES[device.type]) // 4), device=device).fill_(1.0)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes
