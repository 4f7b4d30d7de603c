"""Tests of runs by Lightning's Trainer: they compute, stop and resume as our loop does."""

import os

import pandas as pd
import pytest
import torch.distributed as dist
import vision_runs
from ports import next_port
from vision_runs import asked_to_stop, harmed, table
from worlds import ok

from gptscale.common.errors import ConfigError
from gptscale.lenet.run.config import VisionConfig, option_words
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.run.strategy import check_strategy

LONG = vision_runs.LONG | {"log_every": 1}


@pytest.fixture
def alone(monkeypatch):
    """Make this process a world of one, as a launcher would start it."""
    pytest.importorskip("pytorch_lightning", reason="it needs pip install 'gptscale[lightning-trainer]'")
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (world | {"MASTER_PORT": "set by run", "GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)
    yield
    # A run that fails leaves its group to the end of the process.
    if dist.is_initialized():
        dist.destroy_process_group()


def run(tmp_path, name, **options):
    if "MASTER_PORT" in os.environ:
        # The store of a world that has ended keeps its port until this process ends.
        os.environ["MASTER_PORT"] = str(next_port())
    return vision_runs.run(tmp_path, name, **options)


@pytest.mark.parametrize("strategy", ["trainer_bare", "trainer"])
@pytest.mark.usefixtures("alone")
def test_the_trainer_computes_what_our_loop_does(tmp_path, idx_folder, strategy, whole):
    its = run(tmp_path, "its", data=str(idx_folder), strategy=strategy, **LONG)
    assert its.exit_status == 0
    a, b = (table(outcome, "steps.csv") for outcome in (whole, its))
    assert float(((a.loss - b.loss).abs() / a.loss).max()) <= 1e-5
    for column in ("step", "epoch", "lr"):
        assert a[column].equals(b[column])
    assert (b.load_s > 0).all()
    assert (b.update_s > 0).all()
    ends = [table(one, "epochs.csv")[["epoch", "step", "test_accuracy", "class_accuracy"]] for one in (whole, its)]
    assert ends[0].equals(ends[1])
    assert its.row["strategy"] == strategy
    assert (its.folder / "lightning").is_dir() == (strategy == "trainer")


@pytest.mark.usefixtures("alone")
def test_a_trainer_stopped_within_an_epoch_continues_as_if_it_had_not(tmp_path, idx_folder):
    options = {**LONG, "data": str(idx_folder), "strategy": "trainer_bare"}
    whole = run(tmp_path, "whole", **options)
    with asked_to_stop(8):
        stopped = run(tmp_path, "stopped", **options)
    assert (stopped.exit_status, stopped.row["status"]) == (75, "interrupted")
    assert table(stopped, "steps.csv").step.tolist() == list(range(1, 10))
    resumed = run(tmp_path, "stopped", resume="auto", **options)
    assert resumed.exit_status == 0
    assert table(resumed, "steps.csv").loss.equals(table(whole, "steps.csv").loss)
    for column in ("train_loss", "test_loss", "class_accuracy"):
        assert table(resumed, "epochs.csv")[column].equals(table(whole, "epochs.csv")[column])


@pytest.mark.usefixtures("alone")
def test_weights_in_bf16_are_trained_too(tmp_path, idx_folder):
    """Lightning computes the gradients inside of the optimizer's step, also of our own optimizer."""
    options = {"data": str(idx_folder), "epochs": 2, "precision": "bf16", "amp": False, "optimizer": "sgd", "lr": 0.05}
    ours, its = (run(tmp_path, name, strategy=name, **options) for name in ("single", "trainer_bare"))
    assert table(ours, "steps.csv").loss.equals(table(its, "steps.csv").loss)
    assert its.row["loss_last"] != its.row["loss_first"]


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_not_finite_ends_the_run_by_its_name(tmp_path, idx_folder):
    with harmed(0):
        ended = run(tmp_path, "r", data=str(idx_folder), strategy="trainer_bare", **LONG)
    assert ended.row["status"] == "failed"
    assert "loss nan, at step 1" in ended.row["error"]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_two_ranks_by_the_trainer_give_the_losses_of_one(tmp_path, idx_folder, monkeypatch):
    options = {"data": str(idx_folder), "epochs": 8, "batch_size": 16}
    one = run(tmp_path, "one", strategy="single", **options)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    config = VisionConfig(out=tmp_path, run_name="two", device="cpu", strategy="trainer_bare", **options)
    ok("lenet", "train", "--nproc", 2, *option_words(config))
    a, b = table(one, "steps.csv"), pd.read_csv(tmp_path / "runs/two/steps.csv", float_precision="round_trip")
    assert len(a) == len(b) == 48
    assert float(((a.loss - b.loss).abs() / a.loss).max()) <= 1e-5


def test_what_the_trainer_cannot_do_is_refused(monkeypatch):
    world = world_from_environment(VisionConfig(device="cpu"))
    monkeypatch.setattr("gptscale.lenet.run.strategy.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Lightning's Trainer is not installed, in --strategy trainer, pip install"):
        check_strategy(VisionConfig(strategy="trainer"), world)
    with pytest.raises(ConfigError, match="Lightning Fabric is not installed"):
        check_strategy(VisionConfig(strategy="fabric"), world)
    monkeypatch.setattr("gptscale.lenet.run.strategy.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"loss scale, in --strategy trainer_bare, use --strategy ddp"):
        check_strategy(VisionConfig(strategy="trainer_bare", precision="fp16"), world)
