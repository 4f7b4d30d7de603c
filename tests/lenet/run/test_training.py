"""Tests of vision runs: two processes compute what one computes, and a run that was killed resumes without a trace."""

import errno
import json
import re
import signal
from dataclasses import fields

import pandas as pd
import psutil
import pytest
from holder import reseal
from vision_runs import LONG, asked_to_stop, assert_same_end, harmed, run, table
from worlds import Started, command, ok, ranks, rows

from gptscale.common.checkpoint.reader import step_folders
from gptscale.foresight.verdict.files import read_verdict
from gptscale.launchers.cli import main
from gptscale.lenet.run.columns import CONFIGURATION, LENET, WORK, read_summary
from gptscale.lenet.run.config import NOT_WORK, VisionConfig, option_words
from gptscale.lenet.run.engine import VisionEngine


def steps(outcome):
    return table(outcome).set_index("step")


def test_two_ranks_against_one_processs_arithmetic(idx_folder):
    ranks("world_vision_parity.py", 2, idx_folder)


GOLDEN = {
    "lenet": ({}, [2.3159626, 2.3160353, 2.2944455, 2.3053589]),
    "cnn": (
        {"model": "cnn", "augment": "jitter", "optimizer": "adamw", "weight_decay": 0.05, "lr_schedule": "onecycle"},
        [2.2582977, 2.5124917, 2.405345, 2.3035902],
    ),
    "fp16": (
        {"model": "simple_conv", "precision": "fp16", "loss_scale": "1024"},
        [2.3131893, 2.4359899, 2.3455319, 2.326515],
    ),
    "bf16": (
        {"precision": "bf16", "amp": False, "optimizer": "sgd", "lr": 0.05},
        [2.3159401, 2.310209, 2.2984879, 2.3047811],
    ),
    "1998": (
        {"model": "lenet_classic", "augment": "none", "lr_schedule": "cosine", "label_smoothing": 0.1},
        [2.3186336, 2.3168571, 2.2894356, 2.3018362],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_are_those_of_2026_11_26(tmp_path, idx_folder, name):
    """Of the steps 1, 4 and 8 and of the test, from before the lab was cut down. Other processors round otherwise."""
    options, expected = GOLDEN[name]
    ended = run(tmp_path, "r", data=str(idx_folder), batch_size=16, max_steps=8, epochs=2, **options)
    found = [*steps(ended).loss[[1, 4, 8]], ended.row["test_loss"]]
    assert found == pytest.approx(expected, rel=1e-3 if name in ("fp16", "bf16") else 1e-5)


@pytest.mark.promise("S1")
def test_a_disk_with_too_little_space_ends_the_run_before_its_first_step(small_disk, idx_folder, capsys):
    """A checkpoint of LeNet-5 with adam takes 0.7 MB, and three do not fit into 2 MiB."""
    outcome = run(small_disk, "r", data=str(idx_folder), epochs=9, save_every=1)
    assert outcome.exit_status == 5
    assert "bytes on the disk (3 checkpoints of " in capsys.readouterr().err
    assert not (outcome.folder / "steps.csv").exists()


def test_two_processes_give_the_losses_of_one(tmp_path, idx_folder):
    """Compare by the real command, with augmentation: its draws belong to the image's place and not to a rank."""
    options = {"data": str(idx_folder), "epochs": 4, "batch_size": 16, "augment": "affine"}
    one = run(tmp_path, "one", **options)
    config = VisionConfig(out=tmp_path, run_name="two", device="cpu", tensorboard=False, **options)
    ended = ok("lenet", "train", "--nproc", 2, *option_words(config))
    assert f"  verdict {read_verdict(tmp_path / 'runs/two').line()}" in ended.stdout
    a, b = steps(one), pd.read_csv(tmp_path / "runs/two/steps.csv", float_precision="round_trip").set_index("step")
    assert len(a) == len(b) == 24
    assert float(((a.loss - b.loss).abs() / a.loss).max()) <= 1e-5
    rows = read_summary(tmp_path / "lenet.csv").set_index("run_id")
    assert rows.strategy.to_dict() == {"one": "single", "two": "ddp"}
    assert rows.test_accuracy["two"] == rows.test_accuracy["one"]
    # There are 41 images, 20 and 21 of them on a rank.
    assert round(rows.test_accuracy["two"] * 41, 6).is_integer()
    assert rows.class_accuracy["two"] == rows.class_accuracy["one"]


def test_a_killed_run_continues_bit_identically(tmp_path, idx_folder, whole):
    options = {**LONG, "data": str(idx_folder)}
    config = VisionConfig(out=tmp_path, run_name="killed", device="cpu", tensorboard=False, **options)
    ranks("world_faulty.py", 1, "killed_at,forward,0,10", "lenet", *option_words(config), status=7)
    assert step_folders(tmp_path / "runs" / "killed" / "checkpoints")[0].name == "step-6"
    resumed = run(tmp_path, "killed", resume="auto", **options)
    assert resumed.exit_status == 0
    assert_same_end(whole.folder, resumed.folder)
    assert steps(resumed)["loss"].equals(steps(whole)["loss"])
    epochs = [table(o, "epochs.csv") for o in (whole, resumed)]
    for column in ("train_loss", "test_loss", "test_accuracy", "class_accuracy"):
        assert epochs[0][column].equals(epochs[1][column])
    assert resumed.row["loss_first"] == whole.row["loss_first"]


def test_a_run_asked_to_stop_within_an_epoch_continues_bit_identically(tmp_path, idx_folder, whole):
    options = {**LONG, "data": str(idx_folder), "log_every": 1}
    with asked_to_stop(8):
        stopped = run(tmp_path, "stopped", **options)
    assert stopped.exit_status == 75
    assert stopped.row["status"] == "interrupted"
    assert step_folders(stopped.folder / "checkpoints")[0].name == "step-9"
    resumed = run(tmp_path, "stopped", resume="auto", **options)
    assert_same_end(whole.folder, resumed.folder)
    assert table(resumed, "epochs.csv").train_loss.equals(table(whole, "epochs.csv").train_loss)


def test_a_checkpoint_of_an_older_version_continues_but_not_without_totals(tmp_path, idx_folder, capsys):
    """Its work named the options that were thought of, and other options were none."""
    options = {"data": str(idx_folder), "batch_size": 16, "save_every": 1}
    saved = run(tmp_path, "r", epochs=1, **options).folder / "checkpoints" / "step-6"
    content = json.loads((saved / "manifest.json").read_bytes())
    del content["workload"]["momentum"], content["workload"]["max_steps"]
    reseal(saved, {name: part for name, part in content.items() if name != "past"})
    refused = run(tmp_path, "refused", epochs=2, **options, resume=str(saved))
    assert refused.exit_status == 4
    assert "has no valid 'past'" in refused.row["error"]
    capsys.readouterr()
    reseal(saved, content)
    assert run(tmp_path, "r", epochs=2, **options, resume="newest").exit_status == 0
    assert [line for line in capsys.readouterr().out.splitlines() if " was " in line] == ["epochs was 1, is 2"]


def test_every_option_of_the_work_tells_runs_apart():
    """It is a column by which `compare` groups runs: two repeats differ in nothing but their seed."""
    work = {field.name for field in fields(VisionConfig)} - NOT_WORK
    assert work - {*WORK, *CONFIGURATION} == {"seed", "max_steps"}
    assert {"steps", "data", "image_size"} <= {*WORK}


def test_the_dataloader_continues_bit_identically_too(tmp_path, idx_folder):
    pytest.importorskip("torchvision")
    options = {"data": str(idx_folder), "epochs": 2, "batch_size": 16, "loader": "dataloader", "save_every": 1}
    whole = run(tmp_path, "whole", **options)
    resumed = run(tmp_path, "half", resume=str(whole.folder / "checkpoints" / "step-6"), **options)
    assert_same_end(whole.folder, resumed.folder)


def test_what_a_run_leaves(tmp_path, idx_folder, capfd):
    """It leaves rows, events and lines, and prints no progress bar where there is no terminal."""
    words = ["--data", str(idx_folder), "--epochs", "2", "--out", str(tmp_path), "--run-name", "r", "--device", "cpu"]
    assert main(["lenet", "train", *words]) == 0
    said = capfd.readouterr()
    assert "epoch 2/2  loss" in said.out
    assert "\r" not in said.out + said.err
    assert "\x1b" not in said.out + said.err
    (row,) = rows(tmp_path / "lenet.csv")
    assert list(row) == LENET.names
    assert (row["status"], row["n_train"], row["n_test"], row["steps"]) == ("ok", "96", "41", "6")
    assert len(row["class_accuracy"].split()) == 10
    assert float(row["images_per_s"]) > 0
    assert len(pd.read_csv(tmp_path / "runs/r/steps.csv")) == 6
    assert pd.read_csv(tmp_path / "runs/r/epochs.csv").epoch.tolist() == [1, 2]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "runs/r")).Reload()
    assert [e.step for e in events.Scalars("epoch/test_accuracy")] == [3, 6]
    assert events.Scalars("train/loss")


def test_a_loss_that_is_none_stops_the_run_with_its_row(tmp_path, idx_folder, capsys):
    with harmed(4):
        ended = run(tmp_path, "r", data=str(idx_folder), epochs=5)
    assert ended.exit_status == 6
    assert "loss nan, at step 5" in ended.row["error"]
    assert len(steps(ended)) == 5
    assert read_summary(tmp_path / "lenet.csv").status.tolist() == ["failed"]
    assert "lower --lr" in capsys.readouterr().err


def test_a_run_whose_rank_0_is_killed_leaves_its_row(tmp_path, idx_folder):
    """The launcher writes it, from the run.json of the run's start."""
    words = ["--nproc", "2", "--data", str(idx_folder), "--batch-size", "16", "--epochs", "100000", "--device", "cpu"]
    words += ["--out", str(tmp_path), "--run-name", "r", "--no-tensorboard", "--log-every", "1"]
    launcher = Started(command("lenet", "train", *words))
    file = tmp_path / "runs" / "r" / "steps.csv"
    launcher.wait_for(lambda: file.exists() and file.stat().st_size > 200)
    launcher.ranks()[0].kill()
    status, _, err = launcher.ended()
    assert status == 7
    assert "rank 0 was killed by SIGKILL" in err
    (row,) = read_summary(tmp_path / "lenet.csv").to_dict("records")
    assert (row["run_id"], row["status"], row["model"], row["world_size"]) == ("r", "failed", "lenet", 2)
    assert row["error"] == "ended with status 7 before it could leave its own row"


@pytest.mark.promise(
    "P16 | a data worker is killed | a GPT run reads by a thread, so there is none to kill; a vision run names the "
    "worker, 3"
)
def test_a_killed_data_worker_is_named_and_the_run_ends_with_3(tmp_path, idx_folder, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    step, before = VisionEngine.train_step, set(psutil.Process().children())

    def train_step(engine, batch, lr):
        for worker in set(psutil.Process().children()) - before if batch.step == 2 else ():
            worker.kill()
        return step(engine, batch, lr)

    monkeypatch.setattr(VisionEngine, "train_step", train_step)
    outcome = run(tmp_path, "r", data=str(idx_folder), loader="dataloader", num_workers=1, batch_size=4)
    assert outcome.exit_status == 3
    # The loader tells which worker, or that the connection to it broke, whichever it meets first.
    assert re.search(
        r"a data worker died \((DataLoader worker \(pid|\[Errno 104\] Connection reset)", outcome.row["error"]
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gptscale: error: rank 0: a data worker died")


def test_a_signal_that_comes_while_the_row_is_written_raises_nothing(tmp_path, idx_folder, monkeypatch):
    def late(*_):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    def train_step(engine, batch, lr):
        # As torch's loader does. git, which the row asks for the commit, sends this signal when it ends.
        signal.signal(signal.SIGCHLD, late)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(VisionEngine, "train_step", train_step)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        assert "Connection reset" in run(tmp_path, "r", data=str(idx_folder)).row["error"]
    finally:
        signal.signal(signal.SIGCHLD, before)
