"""The sampler of stacks counts where a thread is, also while it runs Python alone."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from gptscale.common.measure.stack_sampler import Place, StackSampler, places, places_of_thread


def multiplies(seconds: float) -> None:
    """Spend the time in a kernel, which lets other threads run."""
    a, ends = torch.randn(300, 300), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        a @ a


def counts(seconds: float) -> None:
    """Spend the time in Python, which does not."""
    n, ends = 0, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        n += 1


def by_function(stack: Sequence[Place]) -> str | None:
    names = [function for _, function in stack]
    return next((name for name in names if name in ("multiplies", "counts")), None)


def shares_of_equal_turns() -> dict[str, float]:
    with StackSampler(by_function) as sampler:
        for _ in range(10):
            counts(0.02)
            multiplies(0.02)
        # Counts nowhere.
        time.sleep(0.1)
    return sampler.shares()


def test_shares_are_those_of_the_time() -> None:
    before = sys.getswitchinterval()
    # On a busy machine the sampler gets a processor late, more often beside a thread that runs Python: then try again.
    tries = (shares_of_equal_turns() for _ in range(50))
    shares = next(shares for shares in tries if 0.3 < shares.get("counts", 0.0) < 0.7)
    assert sum(shares.values()) == pytest.approx(1)
    assert sys.getswitchinterval() == before
    assert "stack-sampler" not in {thread.name for thread in threading.enumerate()}


def test_no_samples_are_no_shares() -> None:
    with StackSampler(lambda stack: None) as sampler:
        pass
    assert sampler.shares() == {}


def test_no_garbage_is_collected_while_a_stack_is_read() -> None:
    """A collection lets the other thread go on while its frames are read. Python 3.11 crashed after seconds to minutes."""
    during: Counter[str] = Counter()

    def note(phase: str, info: dict[str, int]) -> None:
        during[next((name for _, name in places(sys._getframe()) if name == "places_of_thread"), "elsewhere")] += 1

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(5)
    try:
        for _ in range(100):
            assert places_of_thread(threading.get_ident())[0][1] == "places_of_thread"
            _ = [[] for _ in range(10)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert set(during) == {"elsewhere"}
    assert gc.isenabled()
