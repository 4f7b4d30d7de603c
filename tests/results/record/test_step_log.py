"""A run's own CSV has each step once and only whole rows, whatever the disk did to it."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager

import pytest
from table_rows import rows

from gptscale.common.errors import StorageError
from gptscale.results.columns import STEP_COLUMNS
from gptscale.results.record.step_log import StepLog, close_logs


def step_row(step):
    return {**dict.fromkeys(STEP_COLUMNS, 0.5), "step": step}


def steps_in(path):
    return [int(row["step"]) for row in rows(path)]


def written(path, steps, after_step=0):
    log = StepLog(path, after_step=after_step)
    for step in steps:
        log.append(step_row(step))
    log.close()


@contextmanager
def room_for(size):
    """No file may grow beyond `size` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.promise("S15")
@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"\0" * 512 + b"\n",
        b"\0" * 600 + b"4,0.5,0.5,0.5,0.5,0.5,0.5\n",
        b"4,0.5\n",
        b"four,0.5,0.5,0.5,0.5,0.5,0.5\n",
        b"4.5,0.5,0.5,0.5,0.5,0.5,0.5\n",
        b"4,0.5,0.5,0.5,0.5,0.5,0.5,0.5\n",
        b'4,0.5,"0.5,0.5,0.5,0.5,0.5\n',
        b"9" * 5000 + b",0.5,0.5,0.5,0.5,0.5,0.5\n",
        b"4,\xff,0.5,0.5,0.5,0.5,0.5\n",
        b"4," + b"5" * 10**6 + b",0.5,0.5,0.5,0.5,0.5\n",
        ",".join(STEP_COLUMNS).encode() + b"\n",
    ],
    ids=range(12),
)
def test_a_damaged_line_and_rows_beyond_the_checkpoint_move_aside(tmp_path, capsys, bad):
    path = tmp_path / "steps.csv"
    written(path, range(1, 8))
    header, *rows = path.read_bytes().splitlines(keepends=True)
    # The row of step 7 is torn.
    path.write_bytes(b"".join([header, *rows[:3], bad, *rows[3:]])[:-3])
    written(path, [5, 6], after_step=4)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "steps.discarded.csv").read_bytes() == b"".join([bad, *rows[4:6]])
    torn, damaged = capsys.readouterr().err.splitlines()
    assert "torn" in torn
    assert "line 5 of" in damaged
    assert "held no whole row" in damaged


@pytest.mark.promise(
    "S15 | a torn last line | cut off with a warning; a line with no row in it moves aside; what a spreadsheet changed "
    "is changed back"
)
@pytest.mark.parametrize(
    "saved",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(",", ";"),
        lambda text: "".join('"' + line.replace(",", '","') + '"\r\n' for line in text.splitlines()),
    ],
)
def test_a_file_saved_by_a_spreadsheet_is_mended(tmp_path, capsys, saved):
    path = tmp_path / "steps.csv"
    written(path, range(1, 4))
    before = path.read_bytes()
    path.write_bytes(saved(before.decode()).encode())
    StepLog(path, after_step=3).close()
    assert path.read_bytes() == before
    assert "was saved by a spreadsheet" in capsys.readouterr().err
    assert not path.with_name("steps.discarded.csv").exists()


def test_a_header_or_an_end_without_content_is_written_anew(tmp_path):
    """After a power cut the file has its new size already, but not its content."""
    path = tmp_path / "steps.csv"
    written(path, range(1, 3))
    whole = path.read_bytes()
    headless = [first + whole.partition(b"\n")[2] for first in (b"\n", b"\0" * 99 + b"\n")]
    for content, steps in ((whole + b"\0" * 70_000, []), (b"\0" * 70_000, [1, 2]), *((h, []) for h in headless)):
        path.write_bytes(content)
        written(path, steps, after_step=2 - len(steps))
        assert steps_in(path) == [1, 2]


@pytest.mark.promise("S3 | full for a CSV | rows wait in memory, no line is torn; what never found room is printed")
def test_rows_wait_in_memory_while_the_disk_is_full(tmp_path, capsys):
    path = tmp_path / "steps.csv"
    log = StepLog(path)
    log.append(step_row(1))
    log.flush()
    # There is room for half a row.
    with room_for(path.stat().st_size + 10):
        for step in range(2, 400):
            log.append(step_row(step))
            log.flush()
        log.sync()
        held = path.read_bytes()
    assert held.endswith(b"\n")
    assert held.count(b"\n") == 2
    log.append(step_row(400))
    log.flush()
    # One warning is for the full disk, the other for the space.
    full, space = capsys.readouterr().err.splitlines()
    assert "no space" in full
    assert "rows are held in memory" in full
    assert "there is space again" in space
    assert "399 rows" in space
    log.close()
    assert steps_in(path) == list(range(1, 401))


def test_a_disk_that_stays_full_is_an_error_and_the_rows_are_printed(tmp_path, capsys):
    log = StepLog(tmp_path / "steps.csv")
    log.append(step_row(1))
    with room_for(5), pytest.raises(StorageError, match="no space"):
        log.close()
    said = capsys.readouterr().err
    assert f"rows that {tmp_path / 'steps.csv'} lacks:" in said
    assert said.splitlines()[1:] == [",".join(STEP_COLUMNS), "1,0.5,0.5,0.5,0.5,0.5,0.5"]


@pytest.mark.promise("S4")
def test_a_disk_that_fails_is_an_error(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    log = StepLog(tmp_path / "steps.csv")
    monkeypatch.setattr(os, "fsync", fsync)
    for end in (log.sync, log.close):
        with pytest.raises(StorageError, match=r"Input/output error, in .*steps.csv"):
            end()


@pytest.mark.parametrize("gone", ["the run", "all results", "replaced"])
def test_rows_that_went_with_their_file_are_an_error(tmp_path, gone):
    path = tmp_path / "out" / "r" / "steps.csv"
    path.parent.mkdir(parents=True)
    log = StepLog(path)
    log.append(step_row(1))
    log.flush()
    if gone == "replaced":
        (tmp_path / "new").write_bytes(b"")
        (tmp_path / "new").rename(path)
    else:
        shutil.rmtree(path.parent if gone == "the run" else tmp_path / "out")
    log.append(step_row(2))
    for end in (log.flush, log.close):
        with pytest.raises(StorageError, match="was removed or replaced during the run"):
            end()


def test_an_error_is_not_hidden_by_that_of_closing(tmp_path, capsys):
    logs = [StepLog(tmp_path / name) for name in ("a.csv", "b.csv")]
    (tmp_path / "b.csv").unlink()
    close_logs([*logs, None], failed=True)
    assert "b.csv was removed" in capsys.readouterr().err
    logs = [StepLog(tmp_path / name) for name in ("a.csv", "b.csv")]
    (tmp_path / "b.csv").unlink()
    with pytest.raises(StorageError):
        close_logs(logs, failed=False)
    for log in logs:
        with pytest.raises(OSError, match="Bad file descriptor"):
            log.close()
