"""When checkpoints are saved, and what a full disk costs."""

import pytest

from gptscale.common.errors import StorageError
from gptscale.launchers.run import checkpoints


def test_a_full_disk_costs_a_checkpoint_and_then_the_run(plan, monkeypatch, capsys):
    saves = []

    def save(*args, **options):
        saves.append(args[2])
        raise StorageError("disk full", "in ckpt", "free space")

    monkeypatch.setattr(checkpoints, "save", save)
    saver = checkpoints.Saver(plan("--save-every", "2"), None, None, lambda: None)
    for step in (1, 2, 3, 4):
        saver(step, last=False)
    assert saves == [2, 4]
    assert "missed 2 of 3" in capsys.readouterr().err
    with pytest.raises(StorageError):
        saver(6, last=False)


def test_saves_when_due_and_only_then(plan, monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoints, "save", lambda engine, folder, step, facts, keep: saved.append(step))
    for words, expected in ((["--save-every", "3"], [3, 6, 7]), (["--save-last"], [7]), ([], [])):
        saved.clear()
        saver = checkpoints.Saver(plan(*words), None, None, lambda: None)
        for step in range(1, 8):
            saver(step, last=step == 7)
        assert saved == expected
