"""Schedules simulated in theory: closed forms, and what lies between computations."""

import pytest
import torch

from gptscale.common.measure.bubble import Bubble, StageClock, StageSpan, bubble_fraction, order_of, simulate


def order(schedule, p, m):
    """Return what each stage computes, in order, under torch's schedule of that name."""
    return order_of(type(f"Schedule{schedule}", (), {})(), p, m)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (4, 12)])
def test_bubble_is_that_of_the_closed_form(schedule, p, m):
    assert bubble_fraction(simulate(order(schedule, p, m), p)) == pytest.approx((p - 1) / (m + p - 1))


def test_halves_of_backward_fill_the_bubble():
    """Two stages, two micro-batches: a weight half may wait until there is nothing else to do."""
    whole = simulate(order("1F1B", 2, 2), 2)
    split = {
        0: [("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("W", 0, 0), ("I", 0, 1), ("W", 0, 1)],
        1: [("F", 1, 0), ("I", 1, 0), ("F", 1, 1), ("I", 1, 1), ("W", 1, 0), ("W", 1, 1)],
    }
    assert bubble_fraction(simulate(split, 2)) < bubble_fraction(whole)


def test_an_order_that_waits_for_itself_is_told():
    with pytest.raises(ValueError, match="never ends"):
        simulate({0: [("B", 0, 0), ("F", 0, 0)]}, 1)


def test_the_clock_counts_what_is_computed_within_a_step():
    now = iter([10.0, 10.0, 11.0, 13.0, 14.0, 20.0, 30.0, 40.0, 40.0, 41.0])
    clock = StageClock(torch.device("cpu"), lambda: next(now))
    with clock.step():
        with clock.computing("F", 0, 0):
            pass
        with clock.computing("B", 0, 0):
            pass
    with clock.step():
        pass
    # The spans of a step are read when the next step begins.
    assert clock.spans == (StageSpan("F", 0, 0, 1.0, 3.0), StageSpan("B", 0, 0, 4.0, 10.0))
    assert clock.bubble(0.25) == Bubble(0.25, (8.0, 0.0), (20.0, 1.0), (), 40.0)
