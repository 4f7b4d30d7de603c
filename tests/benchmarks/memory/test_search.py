"""Which batch is tried next, and the limits of the machine."""

import pytest

from benchmarks.memory.search import GIB, Limits, largest_batch, limits, next_batch


@pytest.mark.parametrize("predicted", [1, 7, 60, 100, 1000])
@pytest.mark.parametrize("true", [0, 1, 5, 64, 90, 700])
def test_the_search_ends_within_a_sixteenth_of_the_largest(predicted, true):
    """Where every try beyond it runs out of memory and tells nothing else."""
    known = {}
    while (batch := next_batch(known, predicted, 10**5)) is not None:
        assert batch not in known
        known[batch] = batch <= true
        assert len(known) <= 16
    largest = max((b for b, fitted in known.items() if fitted), default=0)
    assert true - max(1, true // 16) < largest <= true or largest == true
    assert true > 0 or min(known) == 1


def test_nothing_beyond_what_the_machine_has_is_tried():
    assert next_batch({}, 100, 40) == 40
    assert next_batch({40: True}, 100, 40) is None
    assert next_batch({}, 100, 0) is None
    assert largest_batch(lambda batch: batch <= 37) == 37
    assert largest_batch(lambda batch: False) == 0


def test_limits_are_the_machines_and_the_budget_is_the_users(tmp_path):
    given = limits("cpu", 2.0, 8.0, 5.0, tmp_path / "not yet")
    assert (given.budget, given.host, given.disk) == (2 * GIB, 8 * GIB, 5 * GIB)
    of_machine = limits("cpu", None, None, None, tmp_path)
    assert of_machine.host > 0
    assert of_machine.disk > 0
    assert of_machine.physical().budget == of_machine.host
    row = {"status": "ok", "peak_rss_gib": 1.5, "peak_mem_reserved_gib": None}
    assert given.fits(row)
    assert not given.fits(row | {"peak_rss_gib": 2.5})
    assert not given.fits(row | {"status": "oom"})
    gpu = Limits("cuda", 2.0 * GIB, 8.0 * GIB, 0)
    assert not gpu.fits(row)
    assert gpu.fits(row | {"peak_mem_reserved_gib": 1.9})
