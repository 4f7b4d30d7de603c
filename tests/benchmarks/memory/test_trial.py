"""One try: how its run ended, and what is kept of it."""

import subprocess

import pytest

from benchmarks.memory.search import GIB, Limits, WayToFit, largest_batch, limits, next_batch
from benchmarks.memory.trial import COLUMNS, Job, judge, run_try
from gptscale.common.process.ending import OUT_OF_MEMORY_SIGNS, report

JOB = Job("tiny", WayToFit("single"), 64, "fp32", False, "cpu", "cpu: none", 3)


@pytest.mark.parametrize(
    ("code", "stderr", "verdict"),
    [
        (0, "", ("ok", "")),
        (1, "noise\ngptscale: error: rank 0: out of memory (x), on this device, lower\n", "oom"),
        (7, "gptscale: error: rank 0 was killed by SIGKILL, the others were ended\n", "oom"),
        (2, "gptscale: error: cpu_adam is not compiled, here, gptscale prepare\n", "failed"),
        (1, "", "failed"),
    ],
)
def test_how_a_run_ended_is_read_from_its_status_and_last_words(code, stderr, verdict):
    status, why = judge(subprocess.CompletedProcess([], code, "", stderr))
    assert (status, why) == verdict if code == 0 else status == verdict and why


@pytest.mark.parametrize("sign", OUT_OF_MEMORY_SIGNS)
def test_a_library_without_memory_is_out_of_memory(sign, capsys):
    """From what the worker meets, by the line it prints, to what the try is called."""
    noted, status = report(RuntimeError(f"{sign} when calling `cublasCreate(handle)`"), rank=0)
    status, why = judge(subprocess.CompletedProcess([], status, "", capsys.readouterr().err))
    assert status == "oom"
    assert str(noted) in why
    assert sign in why


def test_a_try_is_a_run_of_the_product(monkeypatch):
    """As a user would type it, in a process of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    row = run_try(JOB, 2)
    assert (row["status"], row["why"], row["micro_batch_size"]) == ("ok", "", 2)
    assert row["tokens_per_s"] > 0
    assert 0.2 < row["peak_rss_gib"] < 2
    assert row["peak_mem_reserved_gib"] is None
    assert all(row[k] == v for k, v in JOB.key().items())
    assert set(row) == set(COLUMNS) - {"largest"}


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
