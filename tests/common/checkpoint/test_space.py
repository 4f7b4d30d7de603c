"""The estimate of a run's files: those that it keeps and one that it writes, less those that are there already."""

from types import SimpleNamespace

import pytest

from gptscale.common.checkpoint import space
from gptscale.common.errors import StorageError


@pytest.mark.parametrize(
    ("there", "saves", "keep", "new"),
    [(0, 0, 2, 0), (0, 1, 2, 1), (0, 9, 2, 3), (2, 9, 2, 1), (3, 9, 2, 0), (1, 1, 2, 1)],
)
def test_what_a_run_adds(there, saves, keep, new, tmp_path, monkeypatch):
    for step in range(there):
        folder = tmp_path / "checkpoints" / f"step-{step + 1}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    needed = new * 1000 + 10

    def check(free):
        monkeypatch.setattr(space.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        space.check_free(tmp_path, saves=saves, keep=keep, checkpoint_bytes=1000, log_bytes=10)

    check(needed)
    with pytest.raises(StorageError, match=rf"the run needs {needed:,} bytes on the disk .*{needed - 1:,} are free"):
        check(needed - 1)


def test_a_folder_that_is_not_there_yet_has_the_disk_of_the_nearest_one(tmp_path):
    with pytest.raises(StorageError, match=f"in {tmp_path}, free space"):
        space.check_free(tmp_path / "a" / "b", saves=0, keep=2, checkpoint_bytes=0, log_bytes=2**62)
