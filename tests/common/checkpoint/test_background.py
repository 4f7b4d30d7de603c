"""Saves behind the training: the bytes of a save that waits, of the moment when it began, and its failures are told."""

import errno
import os

import pytest
import torch
from holder import FACTS, Holder

from gptscale.common.checkpoint.background import BackgroundSave
from gptscale.common.checkpoint.reader import step_folders
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import NumericError, StorageError


def test_it_saves_what_the_state_was_when_it_began(tmp_path):
    expected = save(Holder(), tmp_path / "waits", 4, FACTS)
    engine, background = Holder(), BackgroundSave()
    background.begin(engine, tmp_path / "behind", 4, FACTS, keep=2)
    for tensor in engine.tensors.values():
        tensor.fill_(float("nan"))
    engine.steps = 9.0
    background.finish()
    (path,) = step_folders(tmp_path / "behind")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {p.name: p.read_bytes() for p in expected.iterdir()}


def test_the_files_are_those_of_the_library(tmp_path):
    import safetensors.torch

    path = save(Holder(), tmp_path, 4, FACTS)
    tensors = {f"{name}@{','.join('0' * t.ndim)}": t for name, t in Holder().tensors.items()}
    assert (path / "rank-00000-0000.safetensors").read_bytes() == safetensors.torch.save(tensors)


def test_a_failure_is_told_at_its_end_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    background = BackgroundSave()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        background.begin(Holder(), tmp_path, 4, FACTS, keep=2)
        with pytest.raises(StorageError, match="No space left"):
            background.finish()
    broken = Holder()
    broken.tensors["model/b.bias"][3] = torch.inf
    background.begin(broken, tmp_path, 6, FACTS, keep=2)
    with pytest.raises(NumericError, match="holds NaN or Inf"):
        background.finish()
    assert list(tmp_path.iterdir()) == []
    background.begin(Holder(), tmp_path, 8, FACTS, keep=2)
    background.finish()
    assert [path.name for path in step_folders(tmp_path)] == ["step-8"]
