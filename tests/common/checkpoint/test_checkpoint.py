"""Checkpoints: they come back bit for bit in any layout, damage is found, and a failed save leaves nothing."""

import errno
import json
import os
import pathlib
import shutil
import sys

import pytest
import torch
from holder import FACTS, Holder, make_version_1, poison, reseal
from safetensors.torch import load_file

from gptscale.common.checkpoint import reader as checkpoint_reader
from gptscale.common.checkpoint import writer as checkpoint_writer
from gptscale.common.checkpoint.reader import Reader, agreed, newest_valid
from gptscale.common.checkpoint.writer import save
from gptscale.common.errors import CheckpointError, NumericError, StorageError
from gptscale.common.state import Shard


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


@pytest.fixture
def saved(tmp_path):
    save(Holder(), tmp_path, 2, FACTS)
    return save(Holder(), tmp_path, 4, FACTS)


@pytest.mark.parametrize("as_version", [lambda checkpoint: None, make_version_1])
def test_comes_back_bit_for_bit_from_either_version_of_the_format(as_version, saved):
    """The first had neither the manifest's own hash nor the types of tensors."""
    as_version(saved)
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
                for begin, tensor in ((0, shard.tensor[:half]), (half, shard.tensor[half:])):
                    yield Shard(shard.name, tensor, shard.shape, (begin, *shard.offset[1:]))

    monkeypatch.setattr(checkpoint_writer, "FILE_BYTES", 64)
    path = save(Halves(), tmp_path / "other", 1, FACTS)
    assert len(list(path.glob("*.safetensors"))) > 3
    reader = Reader(path).verify()
    for name, t in Holder().tensors.items():
        assert torch.equal(t, reader.read(name))


@pytest.mark.promise("X12")
def test_files_and_folders_are_private(tmp_path):
    saved = save(Holder(), tmp_path / "checkpoints", 2, FACTS)
    assert all(p.stat().st_mode & 0o077 == 0 for p in (saved, saved.parent, *saved.iterdir()))


def test_a_file_has_few_enough_boxes_for_the_bound_on_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "BOXES_PER_FILE", 2)
    assert len(list(save(Holder(), tmp_path, 2, FACTS).glob("rank-*"))) == 2


DATA = "rank-00000-0000.safetensors"


def flip(path):
    data = bytearray((path / DATA).read_bytes())
    data[-7] ^= 1
    (path / DATA).write_bytes(data)


def manifest(text):
    return lambda path: (path / "manifest.json").write_text(text)


def replaced(old, new):
    """Change the text of the manifest, and not the hash of what it then says."""
    return lambda path: manifest((path / "manifest.json").read_text().replace(old, new))(path)


def edit(**changes):
    """Change the manifest and give it the hash of what it then says."""
    return lambda path: reseal(path, json.loads((path / "manifest.json").read_bytes()) | changes)


def entry(**changes):
    """Return a file's entry in the manifest, with one box."""
    box = {"name": "a", "key": "a@0", "offset": [0], "shape": [2], "whole": [2]}
    whole = {"file": DATA, "size": 1, "sha256": "0" * 64, "boxes": [box | changes.pop("box", {})]}
    return edit(files=[whole | changes])


def pipe(path):
    (path / DATA).unlink()
    os.mkfifo(path / DATA)


def large_header(path):
    data = (path / DATA).read_bytes()
    (path / DATA).write_bytes((10**12).to_bytes(8, "little") + data[8:])


DAMAGE = {
    "truncated": (lambda path: os.truncate(path / DATA, 200), "bytes, expected"),
    "lost": (lambda path: (path / DATA).unlink(), "is missing"),
    "added": (lambda path: shutil.copy(path / DATA, path / "rank-00001-0000.safetensors"), "is not in the manifest"),
    "flipped": (flip, "SHA-256"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "empty manifest": (manifest(""), "has 0 bytes"),
    "no JSON": (manifest("{"), "no JSON"),
    "deep JSON": (manifest("[" * 100_000), "no JSON"),
    "a list": (manifest("[]"), "no valid 'format_version'"),
    "other version": (edit(format_version=3), "format version 3"),
    "long version": (edit(format_version=10**400), "format version 1000"),
    "no step": (edit(step=None), "no valid 'step'"),
    "step is a text": (edit(step="9"), "no valid 'step'"),
    "step is a bool": (edit(step=True), "no valid 'step'"),
    "negative step": (edit(step=-5), "no valid 'step'"),
    "huge step": (edit(step=10**400), "no valid 'step'"),
    "step of another folder": (edit(step=6), "has step 6, the folder is step-4"),
    "step changed by hand": (replaced('"step": 4', '"step": 6'), "does not match its own SHA-256"),
    "hash lost": (replaced("_sha", "_sho"), "has lost its own SHA-256"),
    "text counter": (edit(counters={"optimizer_steps": "4"}), "no valid 'counters'"),
    "negative counter": (edit(counters={"optimizer_steps": -4}), "no valid 'counters'"),
    "NaN counter": (edit(counters={"optimizer_steps": float("nan")}), "no valid 'counters'"),
    "path in a name": (edit(files=[{"file": "../../etc/passwd", "boxes": []}]), "none of a checkpoint's"),
    "boxes missing": (edit(files=[{"file": DATA, "size": 1, "sha256": "0" * 64}]), "no valid 'boxes'"),
    "size missing": (entry(size=None), "no valid 'size'"),
    "size is a bool": (entry(size=True), "no valid 'size'"),
    "hash missing": (entry(sha256=None), "no valid 'sha256'"),
    "box without a shape": (entry(box={"shape": None}), "no valid 'shape'"),
    "box outside its tensor": (entry(box={"offset": [1], "key": "a@1"}), "no valid 'shape'"),
    "box of another name": (entry(box={"name": "b"}), "no valid 'key'"),
    "box at another place": (entry(box={"offset": [0, 0]}), "no valid 'shape'"),
    "box missing": (entry(box={"whole": [4]}), "has 2 of 4 elements"),
    "other tensors": (lambda path: entry(size=(path / DATA).stat().st_size)(path), "has other tensors"),
    "pipe": (pipe, "is no file"),
    "large header": (large_header, "a header of 1000000000000 bytes"),
    "large manifest": (lambda path: os.truncate(path / "manifest.json", 2**28), "has 268435456 bytes, expected 1 to"),
    "NaN": (lambda path: poison(path, "model/a.weight"), "tensor 'model/a.weight' holds NaN or Inf"),
}


@pytest.mark.promise("S5 | a cut file in a checkpoint | named with both sizes, the one before is taken")
@pytest.mark.promise("S7 | a missing or additional file | named, the one before is taken")
@pytest.mark.promise(
    "S8 | a manifest that is missing, empty, no JSON, absurd | one line, the one before is taken; bounded in time and "
    "memory"
)
@pytest.mark.promise("X4 | absurd sizes in headers | refused in bounded time and memory")
@pytest.mark.promise("N6")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_taken(saved, tmp_path, damage):
    harm, message = DAMAGE[damage]
    harm(saved)
    with pytest.raises(CheckpointError, match=message.replace("'", ".")):
        Reader(saved).verify()
    warnings = []
    assert newest_valid(tmp_path, warnings.append).step == 2
    (warning,) = warnings
    assert "step-4" in warning
    # A damaged checkpoint is set aside, never deleted.
    assert (tmp_path / "step-4.corrupt").exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, None])
@pytest.mark.parametrize("opened", ["manifest.json", DATA])
def test_a_passing_read_error_renames_no_checkpoint(saved, tmp_path, monkeypatch, number, opened):
    """A disk or a file system of a network cannot open a file, or (None) safetensors is broken."""
    really_open = pathlib.Path.open

    def failing(self, *arguments, **options):
        if self == saved / opened:
            raise OSError(number, os.strerror(number))
        return really_open(self, *arguments, **options)

    if number is None:
        monkeypatch.setitem(sys.modules, "safetensors", None)
    else:
        monkeypatch.setattr(pathlib.Path, "open", failing)
    said = os.strerror(number) if number else "safetensors"
    with pytest.raises(StorageError, match=f"cannot be read .*{said}"):
        newest_valid(tmp_path, pytest.fail)
    assert {path.name for path in tmp_path.iterdir()} == {"step-2", "step-4"}


def test_a_read_error_of_one_rank_is_told_to_all(saved, monkeypatch):
    reader, told = Reader(saved).verify(), []
    monkeypatch.setattr(checkpoint_reader, "gather_objects", lambda outcome: told.append(outcome) or [outcome])
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(StorageError):
        reader.load_into(Holder(fill=0.0))
    assert [type(failure) for _, failure in told] == [StorageError]


@pytest.mark.promise("N8 | a checkpoint that lacks a counter | refused")
def test_a_counter_that_is_missing_is_refused(saved):
    edit(counters={})(saved)
    with pytest.raises(CheckpointError, match=r"has no counter .optimizer_steps"):
        Reader(saved).verify().load_into(Holder(fill=0.0))


@pytest.mark.promise("S6 | a flipped bit | found, wherever it is")
def test_every_single_flipped_bit_is_found(saved):
    original = (saved / DATA).read_bytes()
    generator = torch.Generator().manual_seed(0)
    for position in torch.randint(0, len(original) * 8, (100,), generator=generator).tolist():
        data = bytearray(original)
        data[position // 8] ^= 1 << position % 8
        (saved / DATA).write_bytes(data)
        with pytest.raises(CheckpointError):
            Reader(saved).verify()


@pytest.mark.parametrize("is_main", [True, False])
def test_a_rank_that_does_not_see_the_checkpoint_stops_all(saved, tmp_path, monkeypatch, is_main):
    """Rank 1 is on a machine without the shared disk. Neither rank may go on alone, or it would wait for the other."""
    elsewhere = CheckpointError("manifest.json is missing", "on rank 1", "share the disk")
    calls = []

    def gather(value):
        calls.append(value)
        if len(calls) == 1:
            return [(saved, None), (None, None)]
        assert value is None if is_main else isinstance(value, CheckpointError)
        return [None, elsewhere]

    monkeypatch.setattr(checkpoint_reader, "gather_objects", gather)
    if not is_main:
        shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match="on rank 1"):
        agreed(tmp_path, lambda reader: None, is_main=is_main)
    assert len(calls) == 2


def test_a_state_with_other_tensors_or_another_shape_is_refused(saved):
    more, fewer, other = Holder(fill=0.0), Holder(fill=0.0), Holder(fill=0.0)
    more.tensors["model/c"] = torch.zeros(1)
    del fewer.tensors["model/b.bias"]
    other.tensors["model/b.bias"] = torch.zeros(7)
    shapes = r"shape \(5,\), the run's is \(7,\)"
    for holder, said in ((more, "model/c"), (fewer, "model/b.bias"), (other, shapes)):
        with pytest.raises(CheckpointError, match=said):
            Reader(saved).load_into(holder)


@pytest.mark.promise("N6 | NaN inside a checkpoint | never saved, and refused when it is read")
def test_a_state_with_nan_is_never_committed(saved, tmp_path):
    bad = Holder()
    bad.tensors["model/a.weight"][2, 1] = float("nan")
    with pytest.raises(NumericError, match=r"model/a\.weight holds NaN"):
        save(bad, tmp_path, 6, FACTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-4"]


@pytest.mark.promise("S4 | fsync fails | the save counts as failed and is not committed")
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
    # Only the last fsync comes after the rename: when that one fails, step-6 is there.
    assert names in (["step-2", "step-4"], ["step-2", "step-4", "step-6"])
    assert newest_valid(tmp_path).step == (6 if "step-6" in names else 4)


def test_write_that_reads_back_differently_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "sha256_of", lambda path: "0" * 64)
    with pytest.raises(StorageError, match="reads back differently"):
        save(Holder(), tmp_path, 1, FACTS)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_0_2_0_is_read_to_the_bit():
    """The release wrote it with torch 2.11: `single`, one block of width 2, four steps of AdamW."""
    folder = pathlib.Path(__file__).parent / "of_0.2.0"
    written = {name.split("@")[0]: tensor for name, tensor in load_file(folder / DATA).items()}
    reader = Reader(folder).verify()
    read = {name: reader.read(name) for name in reader.shapes}
    assert (read.keys(), reader.step) == (written.keys(), 4)
    assert all(torch.equal(read[name].view(torch.int32), written[name].view(torch.int32)) for name in read)
