"""The writers keep every whole row, whatever dies beside them, and nothing that a spreadsheet would run."""

import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from table_rows import rows

from gptscale.common.errors import StorageError
from gptscale.results.columns import SUMMARY, cell
from gptscale.results.record.board import Board
from gptscale.results.record.files import append_row, write_json
from gptscale.results.record.run_folder import run_directory
from gptscale.results.record.step_log import StepLog

# They do not wait for the disk, which 8,000 rows would do for half a minute: what writers do to each other is the same.
WRITERS = """
import os, sys
from pathlib import Path
from gptscale.results.columns import SUMMARY
from gptscale.results.record.files import append_row
os.fsync = lambda descriptor: None
for w in range(8):
    if not os.fork():
        for i in range(1000):
            append_row(SUMMARY, Path(sys.argv[1]), {"run_id": f"writer{w}-{i}", "status": "ok", "error": "x" * (i % 300)})
        os._exit(0)
assert [os.wait()[1] for _ in range(8)] == [0] * 8
"""


@pytest.mark.promise("X7 | formulas in CSV text | prefixed, numbers stay numbers")
@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, ""),
        (True, "true"),
        (-1.5, "-1.5"),
        (-3, "-3"),
        (np.float64(0.1), "0.1"),
        (np.int64(-2), "-2"),
        (1 / 3, "0.3333333333333333"),
        (float("nan"), "nan"),
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "' =1"),
        ("\r=1", "' =1"),
        ("\n=1", "' =1"),
        ("  =1", "'  =1"),
        ("two\nlines\x1b[31m", "two lines [31m"),
        ("a=b", "a=b"),
    ],
)
def test_cell(value, written):
    assert cell(value) == written


def test_unknown_column_or_status_is_refused(tmp_path):
    with pytest.raises(ValueError, match="losss"):
        append_row(SUMMARY, tmp_path, {"status": "ok", "losss": 1.0})
    with pytest.raises(ValueError, match="fine"):
        append_row(SUMMARY, tmp_path, {"status": "fine"})
    assert not (tmp_path / "summary.csv").exists()


@pytest.mark.promise("S14 | eight writers of one summary, 1,000 rows each | whole rows, one header")
@pytest.mark.slow
def test_eight_writers_leave_whole_rows_and_one_header(tmp_path):
    subprocess.run([sys.executable, "-c", WRITERS, str(tmp_path)], check=True, timeout=400)
    lines = (tmp_path / "summary.csv").read_text().splitlines()
    found = rows(tmp_path / "summary.csv")
    assert sum(line.startswith("schema_version,") for line in lines) == 1
    assert {row["run_id"] for row in found} == {f"writer{w}-{i}" for w in range(8) for i in range(1000)}
    assert len(found) == 8000
    assert all(None not in row and row["error"] == "x" * (int(row["run_id"].split("-")[1]) % 300) for row in found)


@pytest.mark.promise("S15")
def test_a_torn_last_line_is_cut_and_a_torn_header_written_anew(tmp_path, capsys):
    (tmp_path / "summary.csv").write_text("schema_ver")
    path = append_row(SUMMARY, tmp_path, {"run_id": "first", "status": "ok"})
    capsys.readouterr()
    append_row(SUMMARY, tmp_path, {"run_id": "torn", "status": "ok"})
    path.write_bytes(path.read_bytes()[:-30])
    append_row(SUMMARY, tmp_path, {"run_id": "third", "status": "ok"})
    assert [row["run_id"] for row in rows(path)] == ["first", "third"]
    assert "torn" in capsys.readouterr().err


@pytest.mark.promise("X12")
def test_results_are_private(tmp_path):
    out = tmp_path / "out"
    path = append_row(SUMMARY, out, {"status": "ok"})
    with run_directory(out, "a") as folder:
        write_json(folder / "run.json", {"a": Path("b")})
        StepLog(folder / "steps.csv").close()
        Board(folder).close()
        (events,) = folder.glob("events*")
    for made, mode in ((out, 0o700), (folder, 0o700), (path, 0o600), (folder / "run.json", 0o600), (events, 0o600)):
        assert stat.S_IMODE(made.stat().st_mode) == mode, made


@pytest.mark.promise("X6 | links in the results | refused")
@pytest.mark.parametrize(
    "link", ["summary.csv", "runs", "runs/a", "runs/a/.lock", "runs/a/steps.csv", "summary.csv.lock"]
)
def test_symbolic_links_are_refused(tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    target = outside if link in ("runs", "runs/a") else outside / "file"
    (tmp_path / "out" / link).parent.mkdir(parents=True)
    (tmp_path / "out" / link).symlink_to(target)
    with pytest.raises(StorageError, match="symbolic link"):
        if link.startswith("summary.csv"):
            append_row(SUMMARY, tmp_path / "out", {"status": "ok"})
        with run_directory(tmp_path / "out", "a") as folder:
            StepLog(folder / "steps.csv")
    assert not list(outside.iterdir())


def test_json_is_replaced_in_one_move(tmp_path):
    path = tmp_path / "status.json"
    write_json(path, {"status": "failed"})
    with pytest.raises(TypeError):
        write_json(path, {("not", "a"): "key"})
    assert path.read_text() == '{\n "status": "failed"\n}'
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
