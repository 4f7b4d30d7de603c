"""The recorder of a vision run with given losses and times: what an epoch's row, the totals and the columns hold."""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
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


def test_epochs_that_are_due_and_any_stop_are_saved_behind_their_rows(monkeypatch):
    """Of ten epochs of four steps every third and the last, and within an epoch a run that is asked to stop."""
    done, config = [], VisionConfig(save_every=3, keep_checkpoints=3)
    save = lambda engine, folder, step, facts, keep: done.append((step, facts["past"], keep))  # noqa: E731
    monkeypatch.setattr(checkpoints, "save", save)
    ready = Ready(config=config, recipe="lenet", work={})
    past = EarlierProgress(epoch_loss_sum=1.5, skipped_steps=2)
    recorder = SimpleNamespace(sync=lambda: done.append("rows"), past=past)
    saver = VisionSaver(ready, SimpleNamespace(), recorder, Path("checkpoints"))
    for step in range(1, 41):
        saver(step, step in (7, 40))
    assert done[::2] == ["rows"] * 5
    # The rest of an epoch needs the sums of its beginning.
    assert done[1::2] == [(step, asdict(past), 3) for step in (7, 12, 24, 36, 40)]
