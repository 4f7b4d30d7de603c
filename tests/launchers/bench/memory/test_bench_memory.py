"""`gptscale bench memory` with runs that are formulas: which batches it tries, what it keeps, and what it says."""

import subprocess
from dataclasses import replace

import pandas as pd
import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.process.ending import OUT_OF_MEMORY_SIGNS, report
from gptscale.launchers.bench.memory import command as bench_memory
from gptscale.launchers.bench.memory import trial as memory_try
from gptscale.launchers.bench.memory.command import MemoryOptions, search, ways_of
from gptscale.launchers.bench.memory.formula import Way
from gptscale.launchers.bench.memory.ladder import read_rows
from gptscale.launchers.bench.memory.search import GIB, Limits, limits, most_that, next_batch, resident
from gptscale.launchers.bench.memory.trial import COLUMNS, Job, judge, run_try
from gptscale.launchers.cli import main

WORDS = ["bench", "memory", "--device", "cpu", "--models", "tiny", "--seq-len", "64", "--memory-gib", "1.0"]
JOB = Job("tiny", Way("single"), 64, "fp32", False, "cpu", "cpu: none", 3)


@pytest.fixture
def runs(monkeypatch):
    """Tries answered from the formula, times `error`; `oom`: from this batch on; `fail`: these batches end badly."""
    settings = {"tried": [], "error": 1.0, "oom": 10**9, "fail": ()}

    def fake(job, batch):
        settings["tried"].append((str(job), batch))
        status = "failed" if batch in settings["fail"] else "oom" if batch >= settings["oom"] else "ok"
        peak = resident(job.need(batch), job.way.recipe) * settings["error"] / GIB
        left = {"peak_rss_gib": str(peak), "tokens_per_s": str(1000.0 + batch)} if status == "ok" else {}
        return memory_try.row(job, batch, left, status, "" if status == "ok" else f"made to be {status}")

    monkeypatch.setattr(bench_memory, "run_try", fake)
    return settings


@pytest.mark.parametrize("predicted", [1, 7, 60, 100, 1000])
@pytest.mark.parametrize("true", [0, 1, 5, 64, 90, 700])
def test_the_search_ends_within_a_sixteenth_of_the_largest(predicted, true):
    """Where every try beyond it runs out of memory and tells nothing else."""
    known = {}
    while (batch := next_batch(known, predicted, 10**5)) is not None:
        assert batch not in known
        known[batch] = batch <= true
        assert len(known) <= 16
    found = max((b for b, fitted in known.items() if fitted), default=0)
    assert true - max(1, true // 16) < found <= true or found == true
    assert true > 0 or min(known) == 1


def test_nothing_beyond_what_the_machine_has_is_tried():
    assert next_batch({}, 100, 40) == 40
    assert next_batch({40: True}, 100, 40) is None
    assert next_batch({}, 100, 0) is None
    assert most_that(lambda batch: batch <= 37) == 37
    assert most_that(lambda batch: False) == 0


@pytest.mark.parametrize("error", [0.9, 1.0, 1.2])
def test_few_tries_find_it_when_the_prediction_errs(runs, error, tmp_path, capsys):
    runs["error"] = error
    assert main([*WORDS, "--ways", "single/full/fp32", "--csv", str(tmp_path / "m.csv")]) == 0
    frame = pd.read_csv(tmp_path / "m.csv")
    assert list(frame.columns) == COLUMNS
    assert len(frame) <= 5
    best = int(frame[frame.largest].micro_batch_size.item())

    def peak(batch):
        return resident(JOB.need(batch), "single") * error / GIB

    assert peak(best) <= 1.0 < peak(best + max(1, best // 16))
    said = capsys.readouterr().out
    assert f"single/full/fp32: tiny, batch {best}" in said
    assert f"{peak(best):.2f}" in said


def test_running_out_of_memory_is_an_answer_and_failing_is_not(runs, tmp_path, capsys):
    runs["oom"] = 100
    assert main([*WORDS, "--ways", "single/full/fp32", "--csv", str(tmp_path / "m.csv")]) == 0
    frame = pd.read_csv(tmp_path / "m.csv")
    assert set(frame.status) == {"ok", "oom"}
    assert 94 <= frame[frame.largest].micro_batch_size.item() < 100
    capsys.readouterr()
    runs["fail"] = range(1, 10**6)
    assert main([*WORDS, "--ways", "single/none/fp32,single/full/fp32", "--csv", str(tmp_path / "f.csv")]) == 1
    frame = pd.read_csv(tmp_path / "f.csv")
    assert frame.status.tolist() == ["failed", "failed"]  # one each: the search of a way ends there, the next goes on
    assert frame.why.tolist() == ["made to be failed"] * 2
    assert "note: tiny single/none/fp32: made to be failed" in capsys.readouterr().out


def test_a_later_call_goes_on_where_time_was_up(runs, tmp_path, capsys):
    words = [*WORDS, "--ways", "single/full,single/none/fp32", "--csv", str(tmp_path / "m.csv")]
    assert main([*words, "--minutes", "0"]) == 0
    assert runs["tried"] == []
    said = capsys.readouterr().out
    assert said.count("not finished: time was up") == 4
    assert main(words) == 0
    done = list(runs["tried"])
    frame = pd.read_csv(tmp_path / "m.csv")
    # an hour of other measurements is in the file too: it stays, and so do rows of another machine
    other = frame.head(2).assign(device="another", why=None)
    pd.concat([other, frame.iloc[:-2]]).to_csv(tmp_path / "m.csv", index=False)
    assert main(words) == 0
    again = runs["tried"][len(done) :]
    assert again == done[-2:]
    frame = pd.read_csv(tmp_path / "m.csv")
    assert (frame.device == "another").sum() == 2
    assert len(frame) == len(done) + 2
    assert not frame.duplicated(["device", "activation_checkpointing", "optimizer_state", "micro_batch_size"]).any()


def test_failed_rows_are_tried_again_and_replaced(runs, tmp_path):
    words = [*WORDS, "--ways", "single/full/fp32", "--csv", str(tmp_path / "m.csv")]
    runs["fail"] = range(1, 10**6)
    assert main(words) == 1
    runs["fail"] = ()
    assert main(words) == 0
    assert set(pd.read_csv(tmp_path / "m.csv").status) == {"ok"}


def test_state_that_fits_nowhere_is_a_row_without_a_try(runs, tmp_path, capsys):
    words = ["bench", "memory", "--device", "cpu", "--models", "tiny,gpt2", "--seq-len", "64", "--memory-gib", "1.0"]
    assert (
        main([*words, "--ways", "single/full/fp32", "--md", str(tmp_path / "m.md"), "--png", str(tmp_path / "m.png")])
        == 0
    )
    assert all(job.startswith("tiny") for job, _ in runs["tried"])
    table = (tmp_path / "m.md").read_text()
    assert "| gpt2 | single | full | fp32 | no | - |" in table
    assert "* gpt2 single/full/fp32: memory lacks" in table
    assert "* single/full/fp32: tiny, batch" in table
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_predicts_for_a_device_that_is_not_here(runs, capsys):
    words = ["--device", "cuda", "--memory-gib", "139", "--host-memory-gib", "128", "--disk-gib", "64", "--dry-run"]
    assert main(["bench", "memory", *words]) == 0
    said = capsys.readouterr().out
    assert runs["tried"] == []
    assert "gpt3-13b single/full/fp32: device lacks" in said
    assert "gpt3-13b zero_offload/full/fp32: host lacks" in said
    assert "gpt3-6.7b zero_infinity/full/fp32: disk lacks" in said
    assert "gpt3-6.7b single/full/8bit" not in said


def test_limits_are_the_machines_and_the_budget_is_the_users(tmp_path):
    given = limits("cpu", 2.0, 8.0, 5.0, tmp_path / "not yet")
    assert (given.budget, given.host, given.disk) == (2 * GIB, 8 * GIB, 5 * GIB)
    mine = limits("cpu", None, None, None, tmp_path)
    assert mine.host > 0
    assert mine.disk > 0
    assert mine.physical().budget == mine.host
    row = {"status": "ok", "peak_rss_gib": 1.5, "peak_mem_reserved_gib": None}
    assert given.fits(row)
    assert not given.fits(row | {"peak_rss_gib": 2.5})
    assert not given.fits(row | {"status": "oom"})
    gpu = Limits("cuda", 2.0 * GIB, 8.0 * GIB, 0)
    assert not gpu.fits(row)
    assert gpu.fits(row | {"peak_mem_reserved_gib": 1.9})


def test_a_batch_that_would_endanger_the_machine_is_not_tried(runs, capsys):
    words = [*WORDS[:-1], "50", "--host-memory-gib", "0.8", "--ways", "single/full/fp32"]
    assert main(words) == 0
    largest = most_that(lambda batch: resident(JOB.need(batch), "single") <= 0.8 * GIB)
    assert runs["tried"] == [("tiny single/full/fp32", largest)]
    assert f"nothing beyond {largest} was tried" in capsys.readouterr().out


def test_the_search_looks_at_the_clock_before_each_try(runs, tmp_path):
    limit = limits("cpu", 1.0, None, None, tmp_path)
    found = bench_memory.look(JOB, limit, [])
    times = iter([0.0, 0.0, 61.0])
    search([found], limit, 1.0, lambda: None, lambda: next(times))
    assert len(runs["tried"]) == 1
    assert found.why == "not finished: time was up"


def test_ways_are_words_and_what_is_left_out_means_all():
    assert len(ways_of("single")) == 9
    assert ways_of("zero_offload/full") == [Way("zero_offload", "full", "fp32")]
    assert [way.optimizer_state for way in ways_of("fsdp_offload/full")] == ["fp32", "bf16", "8bit"]
    default = MemoryOptions().chosen()
    assert len(default) == 12
    assert len(MemoryOptions(ways="single/full,single").chosen()) == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "tinny"], "unknown model 'tinny', in --models, did you mean 'tiny'?"),
        (["--ways", "sinlge"], "unknown part 'sinlge' of 'sinlge', in --ways, did you mean 'single'?"),
        (["--ways", "single/fulll"], "did you mean 'full'?"),
        (["--ways", "zero_offload/full/8bit"], "unknown part '8bit'"),
        (["--ways", "single/full/fp32/x"], "more than three parts"),
        (["--steps", "1"], "steps 1 is out of range, in --steps, use 2 to 10000"),
        (["--memory-gib", "0"], "memory_gib 0.0 is out of range"),
        (["--csv", "/nowhere/m.csv"], "/nowhere/m.csv cannot be written, in --csv"),
        (["--nvme-path", "/nowhere"], "/nowhere is no folder, in --nvme-path"),
        (["--device", "cuda", "--dry-run"], "no CUDA device is visible"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys, runs):
    assert main(["bench", "memory", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert runs["tried"] == []


def test_another_csv_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other columns"):
        read_rows(tmp_path / "x.csv")


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


def test_a_try_that_hangs_ends_its_way_and_is_not_tried_again(runs, monkeypatch, tmp_path, capsys):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    with monkeypatch.context() as patch:
        patch.setattr(memory_try, "LIMIT_S", 480.0)
        patch.setattr(subprocess, "run", hang)
        row = run_try(replace(JOB, device=device_name(torch.device("cpu"))), 3)
    assert (row["status"], row["why"], row["peak_rss_gib"]) == ("timeout", "took more than 480 s", None)
    words = [*WORDS, "--ways", "single/full/fp32", "--csv", str(tmp_path / "m.csv")]
    pd.DataFrame([row], columns=COLUMNS).to_csv(tmp_path / "m.csv", index=False)
    assert main(words) == 1
    assert not runs["tried"]
    assert pd.read_csv(tmp_path / "m.csv").status.tolist() == ["timeout"]
    assert "took more than 480 s" in capsys.readouterr().out


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
