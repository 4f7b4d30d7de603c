"""One try: how its run ended, and what is kept of it."""

import subprocess

import pytest

from benchmarks.memory.search import WayToFit
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
