"""What Megatron-LM's tests hold beyond the formula of state: parameters of a rank, machines beside each other, bad tables."""

import csv

import pytest

from benchmarks.foresight.tables import __main__ as tables
from benchmarks.foresight.tables.megatron_memory import MIB, between_machines, read_held
from benchmarks.foresight.tables.rows import CellsOfRow
from gptscale.common.errors import ConfigError, DataError

GPT = {
    "case": "gpt/one",
    "machine": "dev_dgx_a100",
    "iteration_time_s_median": "0.1",
    "num-layers": "12",
    "hidden-size": "512",
    "num-attention-heads": "8",
    "seq-length": "1024",
    "micro-batch-size": "4",
    "global-batch-size": "32",
    "tensor-model-parallel-size": "1",
    "pipeline-model-parallel-size": "1",
    "use-distributed-optimizer": "",
    "num-experts": "",
    "transformer-impl": "transformer_engine",
}
# 12 blocks of 12 h² + 13 h, a table of 51,200 rows, 1,024 positions, and the last norm.
WHOLE = 12 * (12 * 512**2 + 13 * 512) + 51200 * 512 + 1024 * 512 + 2 * 512


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*GPT, "allocated_bytes"])
        writer.writeheader()
        writer.writerows([GPT | row for row in rows])
    return path


def test_what_lies_beyond_the_state_is_told_by_machine(tmp_path, capsys):
    rows = [
        {"allocated_bytes": 18 * WHOLE + 68 * MIB},
        {"allocated_bytes": 18 * WHOLE + 96 * MIB, "machine": "dev_dgx_h100"},
        {"allocated_bytes": 6 * WHOLE + 1.5 * WHOLE + 65 * MIB, "use-distributed-optimizer": "true"},
        {"allocated_bytes": 2**40, "num-experts": "8"},
        {"allocated_bytes": ""},
    ]
    path = write(tmp_path / "golden.csv", *rows)
    held = read_held(path)
    assert [(row.machine, round(row.beyond / MIB, 3)) for row in held] == [("a100", 68), ("h100", 96), ("a100", 65)]
    assert [row.split for row in held] == ["tp 1, pp 1"] * 2 + ["tp 1, pp 1, distributed optimizer"]
    assert len(between_machines(held)) == 1
    assert tables.main(["--held", "--table", str(path)]) == 0
    out = capsys.readouterr().out
    assert "H100 holds 28.0 MiB more than A100 in the median of 1 splits" in out
    assert "68.0 (1)" in out


def test_the_last_stage_has_the_head_and_no_positions(tmp_path):
    path = write(tmp_path / "t.csv", {"allocated_bytes": 2**30, "pipeline-model-parallel-size": "4"})
    (row,) = read_held(path)
    assert row.state == 18 * (3 * (12 * 512**2 + 13 * 512) + 51200 * 512 + 2 * 512)


def test_tensor_ranks_cut_matrices_and_the_table_and_keep_norms():
    from benchmarks.foresight.tables.megatron_memory import parameters

    block = (12 * 512**2 + 7 * 512) / 4 + 6 * 512
    row = CellsOfRow(GPT, "here")
    assert parameters(row, 4, 1) == 12 * block + 51200 // 4 * 512 + 1024 * 512 + 2 * 512


def test_a_table_without_memory_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(",".join(GPT) + "\n" + ",".join(GPT.values()) + "\n")
    with pytest.raises(DataError, match="no column allocated_bytes"):
        read_held(path)


def test_options_that_a_check_would_ignore_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="predicts nothing"):
        tables.TableOptions(tmp_path, csv=tmp_path / "out.csv", held=True)
