"""The tables of others as a command: every row is written, and what is no table is one line."""

import pytest

from benchmarks.foresight.tables.__main__ import main
from gptscale.common.errors import ConfigError, DataError

NCCL = "gpu,n_gpus,size_B,time_ns_out_of_place\n" + "".join(
    f"a100,{ranks},{size},{40000 + 2 * size * (ranks - 1) / ranks / 220:.0f}\n"
    for ranks in (2, 4, 8)
    for size in (2**20, 2**22, 2**24, 2**26, 2**28)
)


def test_a_table_is_checked_and_every_row_written(tmp_path, capsys):
    (tmp_path / "nccl.csv").write_text(NCCL)
    assert main(["--table", str(tmp_path / "nccl.csv"), "--csv", str(tmp_path / "out.csv")]) == 0
    out = capsys.readouterr().out
    assert "15 rows" in out
    assert "answered" in out
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 16
    assert lines[0].startswith("gpu,n_gpus,size_B,time_ns_out_of_place,measured_s,predicted_s")


def test_several_tables_are_calibrated_on(tmp_path, capsys):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.csv").write_text(NCCL)
    files = [str(tmp_path / f"{name}.csv") for name in ("a", "b", "c")]
    assert main(["--table", files[0], "--calibrate-on", *files[1:]]) == 0
    out = capsys.readouterr().out
    assert "answered  15 of 15" in out
    assert "15 calibrated here" in out


def test_bad_input_is_one_line(tmp_path):
    (tmp_path / "a.csv").write_text("gpu,n_gpus,size_B\na100,2,1\n")
    with pytest.raises(DataError, match="has no column 'time_ns_out_of_place'"):
        main(["--table", str(tmp_path / "a.csv")])
    with pytest.raises(ConfigError, match="--csv"):
        main(["--table", str(tmp_path / "a.csv"), "--csv", str(tmp_path / "no" / "out.csv")])
