"""One run at a time has a folder, and the row of a run is never lost."""

import csv
import io
import signal
import subprocess
import sys
import time

import pytest

from gptscale.common.errors import ConfigError, StorageError
from gptscale.results.columns import SUMMARY
from gptscale.results.record import files
from gptscale.results.record.files import write_json
from gptscale.results.record.run_folder import START, leave_row, read_json, run_directory


@pytest.mark.promise(
    "S13 | two runs with one folder | the second is refused and told who has it; the lock of a dead process is gone with it"
)
def test_second_holder_of_a_run_is_told_who_has_it(tmp_path, monkeypatch):
    holder = (
        "import sys, time; from pathlib import Path; from gptscale.results.record.run_folder import run_directory\n"
        "with run_directory(Path(sys.argv[1]), 'a'): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        waits_s: list[float] = []
        monkeypatch.setattr(time, "sleep", waits_s.append)
        with (
            pytest.raises(ConfigError, match=f"in use by pid {process.pid} on host .* since 20"),
            run_directory(tmp_path, "a"),
        ):
            pass
        assert 1 < sum(waits_s) < 60
        # It dies while the next start waits for it.
        monkeypatch.setattr(time, "sleep", lambda seconds: process.kill() or process.wait())
        with run_directory(tmp_path, "a"):
            assert process.returncode == -signal.SIGKILL
    finally:
        process.kill()


def test_the_second_of_two_runs_with_one_new_name_is_refused(tmp_path):
    """Both may have found the name free before either had made the folder. What counts is what the lock's holder sees."""
    with run_directory(tmp_path, "a") as folder:
        write_json(folder / "run.json", {"first": True})
    with pytest.raises(ConfigError, match="run a exists already"), run_directory(tmp_path, "a"):
        pass
    with run_directory(tmp_path, "a", resumes=True):
        assert read_json(folder / "run.json") == {"first": True}


def test_a_row_that_the_disk_does_not_take_is_printed_in_full(tmp_path, monkeypatch, capsys):
    def full(descriptor, data, path):
        raise StorageError("no space", f"in {path}", "free space")

    row = {"run_id": "a", "status": "ok", "error": "", "loss_last": 1 / 3}
    with run_directory(tmp_path, "a") as folder:
        monkeypatch.setattr(files, "append", full)
        assert leave_row(SUMMARY, folder, row, 7) is None
        error, title, *table = capsys.readouterr().err.splitlines()
        assert error.startswith("gptscale: error: no space, in ")
        assert title == "gptscale: the row of this run, which no file has:"
        assert list(csv.DictReader(io.StringIO("\n".join(table)))) == [
            {"run_id": "a", "status": "ok", "error": "", "loss_last": "0.3333333333333333"}
        ]
        monkeypatch.undo()
        monkeypatch.setenv(START, "abc")
        assert leave_row(SUMMARY, folder, row, 7) == tmp_path / "summary.csv"
        assert read_json(folder / "status.json") == {"status": "ok", "error": "", "step": 7, "start": "abc"}


@pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 10**5, "\0", "9" * 10**5])
def test_what_is_no_json_object_is_read_as_nothing(tmp_path, content):
    assert read_json(tmp_path / "status.json") == {}
    (tmp_path / "status.json").write_text(content)
    assert read_json(tmp_path / "status.json") == {}
