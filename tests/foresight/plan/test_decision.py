"""Which rows of a plan are simulated, and what a simulation changes."""

import numpy as np
import pytest

from gptscale.common.errors import ConfigError
from gptscale.foresight.memory.report import RankMemory
from gptscale.foresight.memory.timeline import Allocations, Timeline
from gptscale.foresight.plan.decision import decide, find_limits

GIB = 2**30


def memory_of(nbytes):
    none = np.zeros(0, dtype=np.int64)
    return RankMemory(0, Timeline(Allocations(none, none, none, []), 0, [], []), nbytes, nbytes)


@pytest.fixture
def plan(planned):
    return planned("gpt2", "ddp,fsdp,tensor_parallel,pipeline", batch=64)


def decided(plan, wanted, answer):
    """The recipes that were simulated, in their order. answer(row): what the simulation of a row gives."""
    simulated = []

    def simulate(row):
        simulated.append(row.candidate.run.recipe)
        return answer(row)

    decide(plan, wanted, simulate)
    return simulated


def test_the_recommended_row_is_simulated_first_until_enough_rows_fit(plan):
    recommended = plan.recommended.candidate.run.recipe
    simulated = decided(plan, 2, lambda row: memory_of(GIB))
    assert simulated[0] == recommended
    assert len(set(simulated)) == len(simulated) == 2
    assert sum(row.simulated is not None for row in plan.rows) == 2
    assert plan.recommended.simulated is not None


def test_a_row_that_does_not_fit_after_all_gives_way(plan):
    first = plan.recommended.candidate.run.recipe
    simulated = decided(plan, 2, lambda row: memory_of(GIB * (1000 if row.candidate.run.recipe == first else 1)))
    assert simulated[0] == first
    assert plan.recommended.candidate.run.recipe != first
    assert plan.recommended.simulated.needed == GIB


def test_a_simulation_that_fails_is_told_and_another_row_is_tried(plan):
    first = plan.recommended

    def answer(row):
        if row.candidate.split == first.candidate.split:
            raise ConfigError("no C compiler", "for the mock of CUDA", "apt-get install gcc")
        return memory_of(GIB)

    simulated = decided(plan, 2, answer)
    assert simulated.count(first.candidate.run.recipe) == 1
    assert plan.left_out[f"a simulation of {first.name}"] == "no C compiler, for the mock of CUDA, apt-get install gcc"
    assert sum(row.simulated is not None for row in plan.rows) == 2


def test_every_row_of_the_table_knows_what_bounds_it(plan):
    rows = plan.best[:3]
    find_limits(plan, rows)
    assert all(row.timing.bound_by for row in rows)
    # The plan has the same rows.
    assert all(any(row is other for other in plan.rows) for row in rows)
