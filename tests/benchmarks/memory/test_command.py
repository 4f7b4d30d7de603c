"""`python -m benchmarks.memory` with runs that are formulas: which batches it tries, what it keeps, and what it says."""

import pandas as pd
import pytest

from benchmarks.memory import trial as memory_trial
from benchmarks.memory.__main__ import main
from benchmarks.memory.search import GIB, WayToFit, resident
from benchmarks.memory.trial import COLUMNS, Job
from gptscale.launchers.cli import start

WORDS = ["--device", "cpu", "--models", "tiny", "--seq-len", "64", "--memory-gib", "1.0"]
JOB = Job("tiny", WayToFit("single"), 64, "fp32", False, "cpu", "cpu: none", 3)


@pytest.fixture
def runs(monkeypatch):
    """Answer tries from the formula, times `error`. `oom`: out of memory from this batch on. `fail`: these batches end badly."""
    settings = {"tried": [], "error": 1.0, "oom": 10**9, "fail": ()}

    def fake(job, batch):
        settings["tried"].append((str(job), batch))
        status = "failed" if batch in settings["fail"] else "oom" if batch >= settings["oom"] else "ok"
        peak = resident(job.need(batch), job.way.recipe) * settings["error"] / GIB
        left = {"peak_rss_gib": str(peak), "tokens_per_s": str(1000.0 + batch)} if status == "ok" else {}
        return memory_trial.make_row(job, batch, left, status, "" if status == "ok" else f"made to be {status}")

    monkeypatch.setattr(memory_trial, "run_try", fake)
    return settings


@pytest.mark.parametrize("error", [0.9, 1.0, 1.2])
def test_few_tries_find_it_when_the_prediction_errs(runs, error, tmp_path, capsys):
    runs["error"] = error
    assert start(main, [*WORDS, "--ways", "single/full/fp32", "--csv", str(tmp_path / "m.csv")]) == 0
    frame = pd.read_csv(tmp_path / "m.csv")
    assert list(frame.columns) == COLUMNS
    assert len(frame) <= 5
    best = int(frame[frame.largest].micro_batch_size.item())

    def peak(batch):
        return resident(JOB.need(batch), "single") * error / GIB

    assert peak(best) <= 1.0 < peak(best + max(1, best // 16))
    printed = capsys.readouterr().out
    assert f"single/full/fp32: tiny, batch {best}" in printed
    assert f"{peak(best):.2f}" in printed


def test_running_out_of_memory_is_an_answer_and_failing_is_not(runs, tmp_path, capsys):
    runs["oom"] = 100
    assert start(main, [*WORDS, "--ways", "single/full/fp32", "--csv", str(tmp_path / "m.csv")]) == 0
    frame = pd.read_csv(tmp_path / "m.csv")
    assert set(frame.status) == {"ok", "oom"}
    assert 94 <= frame[frame.largest].micro_batch_size.item() < 100
    capsys.readouterr()
    runs["fail"] = range(1, 10**6)
    assert start(main, [*WORDS, "--ways", "single/none/fp32,single/full/fp32", "--csv", str(tmp_path / "f.csv")]) == 1
    frame = pd.read_csv(tmp_path / "f.csv")
    # There is one row for each way: its search ends there, and the next way goes on.
    assert frame.status.tolist() == ["failed", "failed"]
    assert frame.why.tolist() == ["made to be failed"] * 2
    assert "note: tiny single/none/fp32: made to be failed" in capsys.readouterr().out


def test_a_later_call_goes_on_where_time_was_up(runs, tmp_path, capsys):
    words = [*WORDS, "--ways", "single/full,single/none/fp32", "--csv", str(tmp_path / "m.csv")]
    assert start(main, [*words, "--minutes", "0"]) == 0
    assert runs["tried"] == []
    printed = capsys.readouterr().out
    assert printed.count("not finished: time was up") == 4
    assert start(main, words) == 0
    done = list(runs["tried"])
    frame = pd.read_csv(tmp_path / "m.csv")
    # an hour of other measurements is in the file too: it stays, and so do rows of another machine
    other = frame.head(2).assign(device="another", why=None)
    pd.concat([other, frame.iloc[:-2]]).to_csv(tmp_path / "m.csv", index=False)
    assert start(main, words) == 0
    again = runs["tried"][len(done) :]
    assert again == done[-2:]
    frame = pd.read_csv(tmp_path / "m.csv")
    assert (frame.device == "another").sum() == 2
    assert len(frame) == len(done) + 2
    assert not frame.duplicated(["device", "activation_checkpointing", "optimizer_state", "micro_batch_size"]).any()


def test_state_that_fits_nowhere_is_a_row_without_a_try(runs, tmp_path, capsys):
    words = ["--device", "cpu", "--models", "tiny,gpt2", "--seq-len", "64", "--memory-gib", "1.0"]
    words += ["--ways", "single/full/fp32", "--md", str(tmp_path / "m.md"), "--png", str(tmp_path / "m.png")]
    assert start(main, words) == 0
    assert all(job.startswith("tiny") for job, _ in runs["tried"])
    table = (tmp_path / "m.md").read_text()
    assert "| gpt2 | single | full | fp32 | no | - |" in table
    assert "* gpt2 single/full/fp32: memory lacks" in table
    assert "* single/full/fp32: tiny, batch" in table
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
