"""Checkpoints: they come back bit for bit in any layout, damage is found, and a failed save leaves nothing."""

import json
import os
import shutil

import pytest
import torch

from gptscale.common.checkpoint import writer as checkpoint_writer
from gptscale.common.checkpoint.reader import Reader, newest_valid, step_folders
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import CheckpointError, NumericError, StorageError
from gptscale.common.state import Shard


class Holder:
    """The part of an engine that checkpoints need: named boxes and counters."""

    def __init__(self, fill=None):
        generator = torch.Generator().manual_seed(0)

        def tensor(*shape):
            value = torch.randn(*shape, generator=generator)
            return value if fill is None else torch.full_like(value, fill)

        self.tensors = {
            "model/a.weight": tensor(6, 4),
            "model/b.bias": tensor(5),
            "adamw.exp_avg/a.weight": tensor(6, 4),
        }
        self.steps = 3.0 if fill is None else 0.0

    def state(self):
        for name, t in self.tensors.items():
            yield Shard(name, t, tuple(t.shape), (0,) * t.ndim)

    def counters(self):
        return {"optimizer_steps": self.steps}

    def load_counters(self, counters):
        self.steps = counters["optimizer_steps"]


class Part(Holder):
    """Another layout of the same state: rows [begin, end) of every tensor."""

    def __init__(self, begin, end):
        super().__init__(fill=0.0)
        self.shapes = {n: tuple(t.shape) for n, t in self.tensors.items()}
        self.begin = begin
        self.tensors = {n: t[begin:end].clone() for n, t in self.tensors.items()}

    def state(self):
        for name, t in self.tensors.items():
            yield Shard(name, t, self.shapes[name], (self.begin, *(0,) * (t.ndim - 1)))


FACTS = {"recipe": "single", "world_size": 1, "workload": {}}


@pytest.fixture
def saved(tmp_path):
    save(Holder(), tmp_path, 2, FACTS)
    return save(Holder(), tmp_path, 4, FACTS)


def test_comes_back_bit_for_bit(saved):
    target = Holder(fill=0.0)
    Reader(saved).verify().load_into(target)
    for name, t in Holder().tensors.items():
        assert torch.equal(t, target.tensors[name])
    assert target.steps == 3.0
    assert Reader(saved).step == 4


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (3, 5), (4, 4), (1, 6)])
def test_any_box_can_be_read(saved, begin, end):
    part = Part(begin, end)
    Reader(saved).load_into(part)
    for name, t in Holder().tensors.items():
        assert torch.equal(t[begin:end], part.tensors[name])


def test_boxes_of_several_files_are_joined(saved, tmp_path, monkeypatch):
    """There are several small files, and each tensor was saved as two boxes."""

    class Halves(Holder):
        def state(self):
            for shard in super().state():
                half = shard.shape[0] // 2
                rest = (0,) * (shard.tensor.ndim - 1)
                yield Shard(shard.name, shard.tensor[:half], shard.shape, (0, *rest))
                yield Shard(shard.name, shard.tensor[half:], shard.shape, (half, *rest))

    monkeypatch.setattr(checkpoint_writer, "FILE_BYTES", 64)
    path = save(Halves(), tmp_path / "other", 1, FACTS)
    assert len(list(path.glob("*.safetensors"))) > 3
    reader = Reader(path).verify()
    for name, t in Holder().tensors.items():
        assert torch.equal(t, reader.read(name))


def test_keeps_the_newest(saved, tmp_path):
    for step in (6, 8, 10):
        save(Holder(), tmp_path, step, FACTS, keep=2)
    assert [p.name for p in step_folders(tmp_path)] == ["step-10", "step-8"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-8"]


def test_files_are_private(saved):
    assert all(p.stat().st_mode & 0o077 == 0 for p in saved.iterdir())


DATA = "rank-00000-0000.safetensors"


def truncate(path):
    os.truncate(path / DATA, (path / DATA).stat().st_size - 100)


def lose(path):
    (path / DATA).unlink()


def add(path):
    shutil.copy(path / DATA, path / "rank-00001-0000.safetensors")


def flip(path):
    data = bytearray((path / DATA).read_bytes())
    data[-7] ^= 1
    (path / DATA).write_bytes(data)


def manifest(text):
    def change(path):
        (path / "manifest.json").write_text(text)

    return change


def edit(**changes):
    def change(path):
        content = json.loads((path / "manifest.json").read_bytes())
        (path / "manifest.json").write_text(json.dumps({**content, **changes}))

    return change


DAMAGE = {
    "truncated": (truncate, "bytes, expected"),
    "lost": (lose, "is missing"),
    "added": (add, "is not in the manifest"),
    "flipped": (flip, "SHA-256"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "empty manifest": (manifest(""), "has 0 bytes"),
    "no JSON": (manifest("{"), "no JSON"),
    "deep JSON": (manifest("[" * 100_000), "no JSON"),
    "a list": (manifest("[]"), "no valid 'format_version'"),
    "other version": (edit(format_version=2), "format version 2"),
    "no step": (edit(step=None), "no valid 'step'"),
    "step is a text": (edit(step="9"), "no valid 'step'"),
    "path in a name": (edit(files=[{"file": "../../etc/passwd", "boxes": []}]), "none of a checkpoint's"),
    "boxes missing": (edit(files=[{"file": DATA, "size": 1, "sha256": ""}]), "lacks 'boxes'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(saved, tmp_path, damage):
    harm, message = DAMAGE[damage]
    harm(saved)
    with pytest.raises(CheckpointError, match=message.replace("'", ".")):
        Reader(saved).verify()
    warnings = []
    assert newest_valid(tmp_path, warnings.append).step == 2
    assert len(warnings) == 1
    assert "step-4" in warnings[0]
    assert (tmp_path / "step-4.corrupt").exists()  # set aside, never deleted


def test_every_single_flipped_bit_is_found(saved):
    original = (saved / DATA).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for position in torch.randint(0, len(original) * 8, (100,), generator=generator).tolist():
        data = bytearray(original)
        data[position // 8] ^= 1 << position % 8
        (saved / DATA).write_bytes(data)
        with pytest.raises(CheckpointError):
            Reader(saved).verify()


def test_all_corrupt_is_an_error_and_never_a_fresh_start(saved, tmp_path):
    for path in step_folders(tmp_path):
        flip(path)
    with pytest.raises(CheckpointError, match="no checkpoint that verifies"):
        newest_valid(tmp_path, lambda line: None)
    assert len(list(tmp_path.glob("*.corrupt"))) == 2


def test_state_that_lacks_or_adds_a_tensor_is_refused(saved):
    more, fewer = Holder(fill=0.0), Holder(fill=0.0)
    more.tensors["model/c"] = torch.zeros(1)
    del fewer.tensors["model/b.bias"]
    for holder, name in ((more, "model/c"), (fewer, "model/b.bias")):
        with pytest.raises(CheckpointError, match=name):
            Reader(saved).load_into(holder)


def test_another_shape_is_refused(saved):
    other = Holder(fill=0.0)
    other.tensors["model/b.bias"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"shape \(5,\), the run's is \(7,\)"):
        Reader(saved).load_into(other)


def test_a_state_with_nan_is_never_committed(saved, tmp_path):
    bad = Holder()
    bad.tensors["model/a.weight"][2, 1] = float("nan")
    with pytest.raises(NumericError, match=r"model/a\.weight holds NaN"):
        save(bad, tmp_path, 6, FACTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-4"]


@pytest.mark.parametrize("call", range(1, 5))
def test_a_full_disk_leaves_what_was_there_and_no_half(saved, tmp_path, monkeypatch, call):
    """The error at every fsync in turn: nothing is committed, nothing is left over, the checkpoints before still verify."""
    calls, original = [], os.fsync

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match=r"No space left on device .*free"):
        save(Holder(), tmp_path, 6, FACTS)
    monkeypatch.undo()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names in (["step-2", "step-4"], ["step-2", "step-4", "step-6"])  # the last fsync comes after the rename
    assert newest_valid(tmp_path).step == (6 if "step-6" in names else 4)


def test_write_that_reads_back_differently_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "sha256_of", lambda path: "0" * 64)
    with pytest.raises(StorageError, match="reads back differently"):
        save(Holder(), tmp_path, 1, FACTS)
    assert not list(tmp_path.iterdir())
