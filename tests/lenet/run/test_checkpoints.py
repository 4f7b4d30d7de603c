"""When a vision run saves, and what a checkpoint holds beside the engine's state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gptscale.common.errors import StorageError
from gptscale.launchers.run import checkpoints
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.record import EarlierProgress
from gptscale.lenet.run.worker import VisionSaver, check_space


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list in which what is done to save is written down."""
    done: list[Any] = []
    monkeypatch.setattr(
        checkpoints, "save", lambda engine, folder, step, facts, keep: done.append((step, facts["past"], keep))
    )
    return done


def saver(done: list[Any], save_every: int) -> VisionSaver:
    """Return the saver of a run of ten epochs of four steps, whose recorder says when it is told to put its rows on disk."""
    config, order = VisionConfig(save_every=save_every, keep_checkpoints=3), SimpleNamespace(steps_per_epoch=4)
    world = SimpleNamespace(world_size=1)
    plan: Any = SimpleNamespace(config=config, world=world, recipe="lenet", work={}, batch_order=order)
    plan.run = plan
    past = EarlierProgress(epoch_loss_sum=1.5, skipped_steps=2)
    recorder: Any = SimpleNamespace(sync=lambda: done.append("rows"), past=past)
    engine: Any = SimpleNamespace()
    return VisionSaver(plan, engine, recorder, Path("checkpoints"))


def test_every_third_epoch_and_the_last_are_saved_behind_their_rows(saves: list[Any]) -> None:
    save_checkpoint = saver(saves, 3)
    for step in range(1, 41):
        save_checkpoint(step, step == 40)
    steps = [entry if isinstance(entry, str) else entry[0] for entry in saves]
    assert steps == [*("rows", 12), *("rows", 24), *("rows", 36), *("rows", 40)]


def test_a_run_that_is_asked_to_stop_is_saved_wherever_it_is(saves: list[Any]) -> None:
    saver(saves, 3)(7, True)
    _, (step, past, keep) = saves
    assert (step, keep) == (7, 3)
    # The rest of the epoch needs these sums of its beginning.
    assert (past["epoch_loss_sum"], past["skipped_steps"]) == (1.5, 2)


def test_a_run_without_save_every_saves_nothing(saves: list[Any]) -> None:
    for last in (False, True):
        saver(saves, 0)(40, last)
    assert saves == []


def test_a_disk_that_cannot_take_the_checkpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VisionConfig(save_every=2, tensorboard=False)
    plan: Any = SimpleNamespace(config=config, steps=40, batch_order=SimpleNamespace(steps_per_epoch=4))
    tensor = SimpleNamespace(nbytes=2**60)
    engine: Any = SimpleNamespace(state=lambda: [SimpleNamespace(tensor=tensor)])
    with pytest.raises(StorageError, match="bytes on the disk"):
        check_space(plan, engine, tmp_path)
    tensor.nbytes = 1000
    check_space(plan, engine, tmp_path)
