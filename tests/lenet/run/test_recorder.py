"""The recorder of a vision run with given losses and times: what an epoch's row, the totals and the columns hold."""

import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from gptscale.common.engine import StepResult
from gptscale.common.process.world import World
from gptscale.launchers.run import checkpoints
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.engine import Score
from gptscale.lenet.run.preflight import ReadyVisionRun
from gptscale.lenet.run.record import EarlierProgress, VisionRecorder
from gptscale.lenet.run.worker import VisionSaver


class Ready(SimpleNamespace):
    """A run of two epochs of four steps, of ten images each, on one process."""

    batch_order, steps, world = SimpleNamespace(steps_per_epoch=4), 8, World(0, 0, 1, torch.device("cpu"), 60.0)
    run = property(lambda self: self)
    ends_epoch = ReadyVisionRun.ends_epoch


def take(recorder, clock, steps, losses, skipped=None):
    """Record steps that load for 0.5 s and compute for 1.5 s."""
    for step, loss in zip(steps, losses, strict=True):
        with recorder.waiting():
            clock.passes(0.5)
        clock.passes(1.5)
        recorder.step(step, 0.1, result(loss, None if skipped is None else torch.tensor(skipped)))
        with recorder.paused():
            clock.passes(1.0)


def result(loss, skipped=None):
    return StepResult(torch.tensor(loss), torch.tensor(math.nan), torch.tensor([loss]), skipped)


def end_epoch(recorder, clock, epoch, score, seconds=0.0):
    with recorder.paused():
        clock.passes(seconds)
        recorder.end_epoch(epoch, 4 * epoch, score, seconds)


def opened(folder, clock, *, start_step=0, past=None, **options):
    config = VisionConfig(**{"epochs": 2, "batch_size": 10, "log_every": 1, "tensorboard": False, **options})
    ready = Ready(config=config)
    past = past or EarlierProgress()
    return VisionRecorder(ready, folder, start_step=start_step, past=past, began=90.0, clock=clock)


def test_an_epochs_row_has_the_mean_loss_and_the_rate_of_its_own_time(tmp_path, clock):
    with opened(tmp_path, clock) as recorder:
        take(recorder, clock, range(1, 5), [4.0, 3.0, 2.0, 1.0])
        end_epoch(recorder, clock, 1, Score(0.5, (30, 10), (40, 40)), 5.0)
        take(recorder, clock, range(5, 9), [1.0, 1.0, 1.0, 1.0])
        end_epoch(recorder, clock, 2, None)
    first, second = pd.read_csv(tmp_path / "epochs.csv").to_dict("records")
    assert (first["train_loss"], first["test_loss"], first["test_accuracy"]) == (2.5, 0.5, 0.5)
    assert first["class_accuracy"] == "0.7500 0.2500"
    # 40 images in 8 s. The test took five more.
    assert (first["train_time_s"], first["images_per_s"], first["eval_time_s"]) == (8.0, 5.0, 5.0)
    assert second["train_loss"] == 1.0
    assert math.isnan(second["test_loss"])
    assert pd.read_csv(tmp_path / "steps.csv").loss.tolist() == [4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_resumed_epoch_counts_the_losses_before_and_the_time_since(tmp_path, clock):
    past = EarlierProgress(epoch_loss_sum=7.0, epoch_steps=2, loss_first=4.0, best_accuracy=0.9)
    with opened(tmp_path, clock, start_step=2, past=past) as recorder:
        take(recorder, clock, range(3, 5), [2.0, 1.0])
        end_epoch(recorder, clock, 1, Score(0.5, (8,), (10,)))
        figures = recorder.figures()
    (row,) = pd.read_csv(tmp_path / "epochs.csv").to_dict("records")
    assert row["train_loss"] == 2.5
    assert (row["train_time_s"], row["images_per_s"]) == (4.0, 5.0)
    assert (figures["loss_first"], figures["loss_last"]) == (4.0, 1.0)
    assert (figures["test_accuracy"], figures["best_test_accuracy"]) == (0.8, 0.9)


def test_the_time_to_an_accuracy_counts_from_the_loading_of_the_data(tmp_path, clock):
    with opened(tmp_path, clock) as recorder:
        for epoch, correct in ((1, 980), (2, 990), (3, 993)):
            take(recorder, clock, range(4 * epoch - 3, 4 * epoch + 1), [1.0] * 4)
            end_epoch(recorder, clock, epoch, Score(0.1, (correct,), (1000,)))
        figures = recorder.figures()
    # Eight steps of 2 s with a pause of 1 s after each, from 100 on, and loading had begun at 90.
    assert (figures["seconds_to_99"], figures["seconds_to_99_4"]) == (34.0, None)


@pytest.fixture
def saves(monkeypatch):
    """Return the list in which what is done to save is written down."""
    done = []
    monkeypatch.setattr(
        checkpoints, "save", lambda engine, folder, step, facts, keep: done.append((step, facts["past"], keep))
    )
    return done


def saver(done, save_every):
    """Return the saver of a run of ten epochs of four steps, whose recorder says when it is told to put its rows on disk."""
    config, order = VisionConfig(save_every=save_every, keep_checkpoints=3), SimpleNamespace(steps_per_epoch=4)
    world = SimpleNamespace(world_size=1)
    ready = SimpleNamespace(config=config, world=world, recipe="lenet", work={}, batch_order=order)
    ready.run = ready
    past = EarlierProgress(epoch_loss_sum=1.5, skipped_steps=2)
    recorder = SimpleNamespace(sync=lambda: done.append("rows"), past=past)
    engine = SimpleNamespace()
    return VisionSaver(ready, engine, recorder, Path("checkpoints"))


def test_every_third_epoch_and_the_last_are_saved_behind_their_rows(saves):
    save_checkpoint = saver(saves, 3)
    for step in range(1, 41):
        save_checkpoint(step, step == 40)
    steps = [entry if isinstance(entry, str) else entry[0] for entry in saves]
    assert steps == [*("rows", 12), *("rows", 24), *("rows", 36), *("rows", 40)]


def test_a_run_that_is_asked_to_stop_is_saved_wherever_it_is(saves):
    saver(saves, 3)(7, True)
    _, (step, past, keep) = saves
    assert (step, keep) == (7, 3)
    # The rest of the epoch needs these sums of its beginning.
    assert (past["epoch_loss_sum"], past["skipped_steps"]) == (1.5, 2)
