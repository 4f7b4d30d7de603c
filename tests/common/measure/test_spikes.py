"""Spikes in made-up losses: what is one, what is none, and what a resumed run decides."""

import csv
import math
import random
from itertools import groupby
from pathlib import Path

import pytest

from gptscale.common.measure.spikes import STEPS_MIN, SpikeWatch


def steps(n, seed=0):
    """Losses that fall as those of a new model do, with noise, and gradient norms that fall too."""
    noise = random.Random(seed)
    return [(2 + 4 * math.exp(-i / 40) + noise.gauss(0, 0.02), 1 + 3 / (i + 1) + noise.gauss(0, 0.1)) for i in range(n)]


def watched(steps):
    """Return a watch that has seen these steps."""
    watch = SpikeWatch()
    for step in steps:
        watch.look(*step)
    return watch


def recorded():
    """Return the (loss, norm) of each step of six healthy runs of 300 steps of 8 sequences, on the source of Python's library."""
    path = Path(__file__).parents[3] / "results" / "measured" / "2026-11-21-cpu-optimizer-state.csv"
    with path.open(newline="") as file:
        runs = groupby(csv.DictReader(file), key=lambda row: (row["optimizer_state"], row["seed"]))
        return [[(float(row["loss"]), float(row["grad_norm"])) for row in rows] for _, rows in runs]


@pytest.mark.promise("N5")
def test_healthy_runs_have_none():
    """In each but one of the recorded ones a norm of three times the mean was called a spike."""
    runs = recorded()
    assert len(runs) == 6
    for run in [*runs, *(steps(2000, seed) for seed in range(5))]:
        watch = SpikeWatch()
        assert not [spike for step in run if (spike := watch.look(*step))]


@pytest.mark.promise("N5")
@pytest.mark.parametrize(("loss_factor", "norm_factor", "figure"), [(2.0, 1.0, "loss"), (1.0, 15.0, "gradient norm")])
@pytest.mark.parametrize("at", [150, 220, 290])
def test_a_spike_in_a_recorded_run_is_found(at, loss_factor, norm_factor, figure):
    for run in recorded():
        loss, norm = run[at]
        assert watched(run[:at]).look(loss * loss_factor, norm * norm_factor).figure == figure


def test_extreme_figures_are_compared_too():
    watch = watched((1e-300 if i % 2 else 1e300, 1e-320) for i in range(100))
    assert watch.look(1e308, 0.0) is watch.look(-1.0, 1.0) is None
    assert watch.look(1.0, 1e308).figure == "gradient norm"


@pytest.mark.parametrize(("loss", "norm", "figure"), [(5.0, 1.0, "loss"), (2.0, 9.0, "gradient norm")])
def test_a_spike_is_found_each_time(loss, norm, figure):
    watch = watched(steps(400))
    for _ in range(3):
        spike = watch.look(loss, norm)
        assert (spike.figure, spike.value) == (figure, max(loss, norm))
        assert spike.deviations > 6
        assert f"{figure} {max(loss, norm):.4g} is " in str(spike)
        watch.look(2.0, 1.0)


def test_a_loss_that_stays_high_is_soon_an_ordinary_one():
    watch = watched(steps(400))
    found = [bool(watch.look(6.0, 1.0)) for _ in range(128)]
    assert found[0]
    assert not any(found[40:])


def test_few_steps_falls_and_figures_that_are_not_finite_are_none():
    watch = SpikeWatch()
    assert not any(watch.look(2.0 if i < STEPS_MIN - 1 else 50.0, 1.0) for i in range(STEPS_MIN))
    watch = watched(steps(200))
    assert watch.look(0.01, 0.01) is None
    before = watch.recent()
    assert watch.look(math.nan, 1.0) is watch.look(2.0, math.inf) is None
    assert watch.recent() == before


def test_a_restored_watch_decides_alike():
    whole, resumed = watched(steps(150)), SpikeWatch()
    resumed.restore(whole.recent())
    rest = [(2.0 + 0.001 * i, 1.0) for i in range(300)]
    assert [resumed.look(*step) for step in rest] == [whole.look(*step) for step in rest]
    for damaged in (None, [], [[1.0]], [["x"], [math.nan]], "text"):
        fresh = SpikeWatch()
        fresh.restore(damaged)
        assert fresh.recent() == [[], []]
