"""The runs of a study: in turn or several at once, each in its place, and the first failure ends the study."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.launchers.cli import main
from gptscale.lenet.studies import grid as grid_module
from gptscale.lenet.studies.grid import run_at_once
from gptscale.lenet.studies.precision import PrecisionOptions

LENET = ["--model", "lenet", "--batch-size", "32", "--modes", "fp32,bf16", "--device", "cpu"]


def test_a_failure_begins_no_further_run(monkeypatch):
    """The two runs that have begun when the failure is found end after the others were given up."""
    begun, given_up, shutdown = [], threading.Event(), ThreadPoolExecutor.shutdown

    def run(i):
        begun.append(i)
        if i == 1:
            raise GptscaleError("it failed", "in run 1", "look")
        if i > 1:
            given_up.wait(300)

    def give_up(pool, *, wait, cancel_futures):
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        given_up.set()
        shutdown(pool, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", give_up)
    with pytest.raises(GptscaleError, match="it failed"):
        run_at_once(run, [(i,) for i in range(20)], 2)
    assert set(begun) <= {0, 1, 2, 3}


@pytest.mark.slow
def test_modes_at_once_on_a_cpu_share_its_cores(study, undrawn, monkeypatch, capsys):
    """Each run is a process of its own here, and their rows stand in the order of the grid."""
    monkeypatch.undo()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    run_cell, both = grid_module.run_cell, threading.Barrier(2, timeout=400)

    def together(config, cell, place):
        # Only runs that go on at the same time meet here.
        both.wait()
        run_cell(config, cell, place)

    monkeypatch.setattr(grid_module, "run_cell", together)
    rows = study("precision", *LENET, "--devices", "0,1")
    assert rows.index.tolist() == ["fp32", "bf16"]
    assert rows.threads.tolist() == [2, 2]


def test_each_gpu_that_is_visible_has_a_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert PrecisionOptions(devices="0,3").places == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-7")
    assert PrecisionOptions(devices="1").places == [{"CUDA_VISIBLE_DEVICES": "GPU-7"}]
    with pytest.raises(ConfigError, match=r"there are 2 GPUs, in --devices, use 0 to 1"):
        _ = PrecisionOptions(devices="2").places
    assert PrecisionOptions().places == [{}]


def test_rows_of_earlier_calls_are_shown_again_and_together(study, undrawn, tmp_path, capsys):
    modes = ["--model", "lenet", "--batch-size", "32", "--modes", "fp32"]
    for seed in ("1", "7"):
        assert study("precision", *modes, "--first-seed", seed).seed.tolist() == [int(seed)]
        for end in (".csv", "-epochs.csv"):
            (tmp_path / f"s{end}").rename(tmp_path / f"{seed}{end}")
    files = {kind: tmp_path / f"both.{kind}" for kind in ("csv", "md", "png")}
    words = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    capsys.readouterr()
    assert main(["lenet", "precision", "--rows", f"{tmp_path / '1.csv'},{tmp_path / '7.csv'}", *words]) == 0
    assert pd.read_csv(files["csv"]).seed.tolist() == [1, 7]
    assert len(pd.read_csv(tmp_path / "both-epochs.csv")) == 2
    assert "round" not in capsys.readouterr().err
    assert main(["lenet", "precision", "--rows", str(tmp_path / "1.csv"), "--epochs", "3"]) == 2
    assert "--rows runs nothing, in --epochs" in capsys.readouterr().err
