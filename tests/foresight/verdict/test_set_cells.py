"""Cells of a row are filled in afterwards, and nothing else in the file changes."""

import pytest

from gptscale.foresight.verdict.of_run import set_cells
from gptscale.results.columns import SUMMARY
from gptscale.results.record.files import append_row

HEADER = b"schema_version,run_id,error,bound_by\n"
CELLS = {"bound_by": "data-bound", "bound_share": 0.5}


@pytest.mark.parametrize(
    ("before", "row", "after"),
    [
        (b"7,r,,\n", b'7,r,"a, b",', b"\n7,rr,,\n"),
        # Damage around the row stays.
        (b"\xff\x00\r\n\n", b"7,r,,", b"\n7,s"),
    ],
)
def test_the_last_row_of_a_run_gets_the_cells(tmp_path, before, row, after):
    path = tmp_path / "summary.csv"
    path.write_bytes(HEADER + before + row + after)
    assert set_cells(path, "r", CELLS)
    assert path.read_bytes() == HEADER + before + row + b"data-bound" + after
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        HEADER,
        # Torn, of another length, not text, not as we write it.
        HEADER + b"7,r,,",
        HEADER + b"7,r,,,,\n",
        HEADER + b"7,r\n",
        HEADER + b"7,r,\xff,\n",
        HEADER + b'7,"r",,\n',
        HEADER + b'7,r,"open\n',
        b"\x00\n7,r,,\n",
    ],
)
def test_what_is_no_row_of_the_run_stays_as_it_is(tmp_path, damage):
    path = tmp_path / "summary.csv"
    path.write_bytes(damage)
    assert not set_cells(path, "r", CELLS)
    assert path.read_bytes() == damage


def test_a_row_of_append_row_is_found(tmp_path):
    assert not set_cells(tmp_path / "summary.csv", "r", CELLS)
    path = append_row(SUMMARY, tmp_path, {"run_id": "r", "status": "ok", "data": "=1+2"})
    assert set_cells(path, "r", CELLS)
    assert path.read_text().count("data-bound") == 1
