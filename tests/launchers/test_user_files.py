"""Whatever a user names where a small file is read: one line, at once, and in little memory."""

import json
import os
import resource
import time

import pytest

from benchmarks.model.floors import read_floors
from gptscale.common.engines.zero.options import merged
from gptscale.common.errors import GptscaleError
from gptscale.common.settings import user_file
from gptscale.common.settings.plan_file import read_row
from gptscale.foresight.calibrate import file as calibration
from gptscale.launchers.commands.run import with_plan
from gptscale.lenet.comparison.rows import read_rows
from gptscale.lenet.run.columns import read_summary
from gptscale.recipes.zero import ZeroConfig
from gptscale.results.columns import SUMMARY
from gptscale.results.comparison.read import load
from gptscale.results.record.launch_with_row import rows_of
from gptscale.results.record.run_folder import check_results_folder, read_json

READERS = {
    "--ds-config": lambda path: merged({}, path),
    "the hash of --ds-config": lambda path: ZeroConfig(stage=2, ds_config=path).contents(),
    "a calibration": calibration.read,
    "a plan": read_row,
    "--plan on the command line": lambda path: with_plan(["ddp", "--plan", str(path)]),
    "--floors": lambda path: read_floors(path, ["gptscale"]),
    "a lenet.csv": read_summary,
    "--rows": lambda path: read_rows(str(path), "bars"),
    "a summary": lambda path: load([path]),
}
# A hash has nothing against any content.
BY_CONTENT = [name for name in READERS if name != "the hash of --ds-config"]
JSON_READERS = ["--ds-config", "a calibration", "a plan", "--plan on the command line"]


def refused(read, path):
    """Return the one line that refuses a file, in two seconds of the processor."""
    began = time.process_time()
    with pytest.raises(GptscaleError) as error:
        read(path)
    assert time.process_time() - began < 2
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file(reader, tmp_path):
    """A pipe without a writer, a device without an end, a folder, and a link to each."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, target in (("link", "pipe"), ("device", "/dev/zero"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    for name in ("pipe", "folder", "link", "device"):
        refused(READERS[reader], tmp_path / name)


@pytest.mark.parametrize("reader", BY_CONTENT)
def test_text_that_is_none(reader, tmp_path):
    path = tmp_path / "file"
    for content in (b"\xff\xfe\x00\x01" * 100, b"\0" * 5000, b'"' * 99, b"a,b\n" + b"1," * 10**5 + b"\n", b"\n"):
        path.write_bytes(content)
        refused(READERS[reader], path)


@pytest.mark.promise("X4")
@pytest.mark.parametrize("reader", ["--ds-config", "the hash of --ds-config", "a calibration", "a plan", "--floors"])
def test_a_file_without_an_end(reader, tmp_path):
    """It has a hole of a terabyte, of which nothing is read into memory."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "it has more than" in refused(READERS[reader], path)
    # Both sides are in KiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18


@pytest.mark.parametrize("reader", JSON_READERS)
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        ("NaN", "NaN is no number"),
        ("-Infinity", "-Infinity is no number"),
        ("1e400", "1e400 is no finite number"),
        ("9" * 5000, "a number of 5000 digits"),
        ("[" * 10**5 + "]" * 10**5, "nested deeper than"),
        ("[" * 100 + "]" * 100, "nested deeper than"),
        ("1,", "it is no JSON"),
    ],
)
def test_json_that_is_no_setting(reader, number, reason, tmp_path):
    path = tmp_path / "file"
    path.write_text(f'{{"format": 2, "machines": [{number}], "rows": [], "sha256": "", "recommended": 1}}')
    assert reason in refused(READERS[reader], path)


def test_a_calibration_with_a_spread_that_is_none(tmp_path):
    path = tmp_path / "file"
    machine = {"device": "cpu", "torch": "2", "threads": 1, "world": 1}
    timed = {"kind": "pass", "shape": [8], "precision": "fp32", "seconds": 1.0, "spread": 0.1, "repeats": 3, "date": ""}
    path.write_text(json.dumps({"format": 2, "machines": [machine | {"operations": [timed]}]}))
    assert calibration.read(path)[0].operations[0].spread == 0.1
    for changed in ({"spread": -1}, {"seconds": "x"}, {"spread": None}, {"spread": [1]}):
        path.write_text(json.dumps({"format": 2, "machines": [machine | {"operations": [timed | changed]}]}))
        assert "this is no calibration" in refused(calibration.read, path)


@pytest.mark.parametrize("floor", ["nan", "inf", "1e400", "-inf", "x", ""])
def test_a_floor_that_is_no_number(floor, tmp_path):
    path = tmp_path / "floors.csv"
    path.write_text(f"name,floor\nover_gptscale,{floor}\n")
    assert "is no CSV with columns name and floor" in refused(READERS["--floors"], path)


@pytest.mark.timeout(20)
def test_a_summary_that_is_a_pipe_holds_up_no_run(tmp_path):
    os.mkfifo(tmp_path / "summary.csv")
    with pytest.raises(GptscaleError, match=r"summary.csv is no file, in --out"):
        check_results_folder(tmp_path, None, SUMMARY, resumes=False)
    os.mkfifo(tmp_path / "run.json")
    assert read_json(tmp_path / "run.json") == {}
    (tmp_path / "device").symlink_to("/dev/zero")
    assert read_json(tmp_path / "device") == {}


def test_rows_are_counted_line_by_line(tmp_path):
    assert rows_of(tmp_path / "none.csv", "r") == 0
    (tmp_path / "summary.csv").write_bytes(b"v,run_id,s\n7,r,ok\n7,q,ok\n7,r,ok\n\xff,r,\n")
    assert rows_of(tmp_path / "summary.csv", "r") == 3


def test_what_a_user_may_write(tmp_path):
    def refuse(reason):
        return GptscaleError(reason, "there", "mend it")

    path = tmp_path / "file"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1, -2.5, 9223372036854775807, null, "\xc3\xa4"]}')
    assert user_file.read_json(path, 100, refuse) == {"a": [1, -2.5, 2**63 - 1, None, "ä"]}
    path.write_bytes(b'name,floor\r\n"a, b",1\r\n')
    link = tmp_path / "link"
    link.symlink_to(path)
    assert user_file.read_rows(link, 100, refuse, ("floor",)) == [{"name": "a, b", "floor": "1"}]
    for columns, content, reason in (
        (("x",), b"a,b\n1,2\n", "it has no column x"),
        (("a",), b"a,b\n1\n", "line 2 has not 2 cells"),
        (("a",), b'a,b\n1,"2\n', "it is no CSV"),
        (("a",), b"", "it has no column a"),
    ):
        path.write_bytes(content)
        with pytest.raises(GptscaleError, match=reason):
            user_file.read_rows(path, 100, refuse, columns)
