"""A small disk, filled, freed and emptied."""

import errno

import pytest

from tools.soak import disk
from tools.soak.disk import SmallDisk


def test_a_full_disk_takes_no_byte_until_it_is_freed(small_disk):
    on_disk = SmallDisk(small_disk)
    on_disk.fill()
    with pytest.raises(OSError, match="No space left") as raised:
        (small_disk / "file").write_bytes(b"x")
    assert raised.value.errno == errno.ENOSPC
    on_disk.free()
    on_disk.free()
    assert (small_disk / "file").write_bytes(b"x" * 4096) == 4096


def test_a_cleared_disk_is_empty(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "file").touch()
    SmallDisk(tmp_path).clear()
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_mounted_there_is_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_mount", lambda *words: False)
    with disk.small_disk(tmp_path / "disk") as none:
        assert none is None
    monkeypatch.undo()

    def missing(*arguments, **options):
        raise FileNotFoundError(errno.ENOENT, "no mount here")

    monkeypatch.setattr(disk.subprocess, "run", missing)
    assert disk._mount("nowhere") is False
