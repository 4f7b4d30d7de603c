"""The one timer of the benches: who runs when, and what counts as the time of a call."""

import pytest
import torch

from benchmarks import timing
from gptscale.common.measure import speed

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls move, and a list of the calls in their order."""
    now, order = [0.0], []

    def call(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds[min(order.count(name), len(seconds)) - 1]

        return run

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    return call, order


def test_a_call_is_timed_over_many_and_all_take_turns(clock):
    """The first call of each warms up. The second one decides how many calls fill a round."""
    call, order = clock
    calls = {"slow": call("slow", [5.0, 0.01]), "fast": call("fast", [5.0, 0.004])}
    assert timing.medians(calls, CPU) == pytest.approx({"slow": 0.01, "fast": 0.004})
    one_round = ["slow"] * 2 + ["fast"] * 5
    assert order == ["slow"] * 2 + ["fast"] * 2 + one_round * timing.REPEATS


def test_the_median_is_not_moved_by_one_disturbance(clock):
    call, _ = clock
    assert timing.medians({"": call("", [1.0, 1.0, 1.0, 99.0, 1.0])}, CPU)[""] == pytest.approx(1.0)


def test_the_order_changes_and_each_turn_follows_a_call_that_is_not_timed(clock):
    call, order = clock
    calls = {name: call(name, [1.0]) for name in ("ours", "torch", "copy")}
    rounds = list(timing.rounds_in_changing_order(calls, CPU, 3))
    assert rounds == [pytest.approx(dict.fromkeys(calls, 1.0))] * 3
    swapped = ["torch", "torch", "ours", "ours", "copy", "copy"]
    in_order = ["ours", "ours", "torch", "torch", "copy", "copy"]
    assert order == in_order + in_order + swapped + in_order
