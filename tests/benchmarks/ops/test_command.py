"""`python -m benchmarks.ops` compares contenders that compute the same, draws its pictures, and refuses bad input."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.ops import cases as ops_cases
from benchmarks.ops.__main__ import main
from gptscale.launchers.cli import start


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(ops_cases, "POOLED", ((2, 16, 12, 12),))
    monkeypatch.setattr(ops_cases, "CONVOLVED", ((2, 1, 12, 8, 5, 1, 2, 1), (2, 4, 12, 4, 3, 2, 1, 4)))


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_the_command(tmp_path, capsys):
    words = ["--largest-kib", "4", "--rounds", "1", "--dtypes", "fp32", "--threads", "1"]
    assert start(main, [*words, "--csv", str(tmp_path / "o.csv"), "--pictures", str(tmp_path / "p")]) == 0
    rows = pd.read_csv(tmp_path / "o.csv")
    assert set(rows.operator) == set(ops_cases.OPERATORS)
    convolutions = rows[rows.operator == "conv_bias_relu"]
    assert (convolutions.flops > 0).all()
    first = convolutions.iloc[0]
    # There are 2 operations for each product, and 2 images x 8 channels x 12 x 12 outputs of 25 products each.
    assert first.flops == 2 * 2 * 8 * 12 * 12 * 25
    assert (rows.matmul_gflop_per_s > 0).all()
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["conv_bias_relu.png", "gelu.png", "max_pool.png"]
    assert "copy at the largest size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--operators", "gulu"], "unknown operator 'gulu', in --operators, did you mean 'gelu'?"),
        (["--dtypes", "fp8"], "unknown dtype 'fp8', in --dtypes"),
        (["--threads", "0"], "bad threads '0', in --threads"),
        (["--rounds", "0"], "out of range"),
        (["--device", "tpu"], "no device 'tpu' here, in --device"),
        (["--csv", "nowhere/o.csv"], "nowhere/o.csv cannot be written, in --csv"),
        (["--pictures", __file__], "is no folder, in --pictures"),
    ],
)
def test_refused(words, message, capsys):
    assert start(main, [*words]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
