"""The rows of columns.csv make the header and the page of metrics, and a file of an earlier version is continued."""

import stat
import zlib
from pathlib import Path

import pytest
from table_rows import rows

from gptscale.common.errors import ConfigError, StorageError
from gptscale.results.columns import SUMMARY, RunColumn, RunTable, cells_of, csv_line
from gptscale.results.comparison.groups import compare
from gptscale.results.comparison.read import load
from gptscale.results.record.files import append_row
from gptscale.results.record.run_folder import check_results_folder

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "metrics.md"
# CRC-32 of the header that each released version wrote.
HEADERS = {1: 3829316469, 2: 932836789, 3: 1331551777, 4: 1069512303, 5: 974848968, 6: 826681246, 7: 276683581}
ROW = {"run_id": "new", "status": "ok", "recipe": "ddp", "world_size": 2, "optimizer": "sgd", "lr": 0.5}


def header_of(version):
    return csv_line(column.name for column in SUMMARY.columns if column.since <= version)


def older(folder, version, *lines):
    """Leave a summary.csv of an earlier version with one row of it, and `lines` below."""
    names = cells_of(header_of(version))
    old = {"schema_version": str(version), "run_id": "old", "status": "ok", "recipe": "ddp", "error": 'said "no", once'}
    row = csv_line(old.get(name, "2" if SUMMARY[name].type is not str else "") for name in names)
    (folder / "summary.csv").write_bytes(header_of(version) + row + b"".join(lines))
    return old


def test_the_page_of_metrics_has_the_table_of_the_rows():
    lines = [f"| `{c.name}` | {c.unit} | {c.since} | {c.doc} |\n" for c in SUMMARY.columns]
    # To make the table anew, put these lines into the page.
    assert f"| --- | --- | ---: | --- |\n{''.join(lines)}\n" in PAGE.read_text()
    assert all(column.doc and "|" not in column.doc and column.source for column in SUMMARY.columns)


def test_names_are_unique_and_every_version_is_a_part_of_the_next():
    assert len(set(SUMMARY.names)) == len(SUMMARY.names)
    assert SUMMARY.version == max(HEADERS) + 1
    assert {version: zlib.crc32(header_of(version)[:-1]) for version in HEADERS} == HEADERS


@pytest.mark.parametrize("version", HEADERS)
def test_an_older_file_is_read_extended_and_continued(version, tmp_path):
    old = older(tmp_path, version)
    assert len(load([tmp_path])) == 1
    check_results_folder(tmp_path, "new", SUMMARY, resumes=False)
    append_row(SUMMARY, tmp_path, ROW)
    append_row(SUMMARY, tmp_path, ROW | {"run_id": "next"})
    path = tmp_path / "summary.csv"
    assert path.read_bytes().startswith(SUMMARY.header)
    first, second, third = rows(path)
    assert {name: first[name] for name in old} == old
    assert {first[column.name] for column in SUMMARY.columns if column.since > version} == {""}
    assert first["pp_size"] == "2"
    assert (second["optimizer"], second["lr"], second["schema_version"]) == ("sgd", "0.5", str(SUMMARY.version))
    assert third["run_id"] == "next"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(load([tmp_path])) == 3


def test_damaged_lines_of_an_older_file_stay_and_are_told(tmp_path):
    older(tmp_path, 5, b"half,a,line\n", b"\xff\0\n", b"torn,li")
    append_row(SUMMARY, tmp_path, ROW)
    lines = (tmp_path / "summary.csv").read_bytes().split(b"\n")
    assert lines[2:4] == [b"half,a,line", b"\xff\0"]
    assert cells_of(lines[4])[1] == "new"
    assert len(compare(load([tmp_path])).apart) == 2


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (SUMMARY.header.replace(b"\n", b",warp_factor\n"), "is of a newer gptscale .it has the column warp_factor."),
        (b"my,own,table\n", "has other columns"),
        (SUMMARY.header.replace(b"run_id", b"name"), "has other columns"),
        (SUMMARY.header.replace(b"plan_hash", b"run_id"), "has other columns"),
        (b"my,own", "has other columns"),
    ],
)
def test_a_newer_or_foreign_file_is_refused_and_left_alone(header, reason, tmp_path):
    content = header + b"1,2,3\n"
    (tmp_path / "summary.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=f"summary.csv {reason}"):
        check_results_folder(tmp_path, None, SUMMARY, resumes=False)
    with pytest.raises(StorageError, match=f"summary.csv {reason}"):
        append_row(SUMMARY, tmp_path, ROW)
    assert (tmp_path / "summary.csv").read_bytes() == content


def test_a_table_of_ones_own_is_written_and_extended_likewise(tmp_path):
    accuracy = RunColumn("accuracy", title="accuracy %", form=".1f", scale=100)
    columns = RunColumn("run_id", str), RunColumn("status", str), accuracy
    append_row(RunTable("own.csv", columns), tmp_path, {"run_id": "a", "status": "ok", "accuracy": 0.5})
    wider = RunTable("own.csv", (*columns[:1], RunColumn("images", int, since=2), *columns[1:]))
    path = append_row(wider, tmp_path, {"run_id": "b", "status": "oom", "images": 7})
    assert path.read_text() == "run_id,images,status,accuracy\na,,ok,0.5\nb,7,oom,\n"
    with pytest.raises(StorageError, match="is of a newer gptscale"):
        append_row(RunTable("own.csv", columns), tmp_path, {"status": "ok"})
    assert [columns[2].shown(value) for value in (0.987, None)] == ["98.7", "-"]
    assert wider.of_type(int) == ["images"]
