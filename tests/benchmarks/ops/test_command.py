"""`python -m benchmarks.ops`: both contenders of a case compute the same, and it draws its pictures."""

import pandas as pd
import pytest
import torch

from benchmarks.ops import cases as ops_cases
from benchmarks.ops.__main__ import main
from benchmarks.ops.pictures import roofline
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


@pytest.mark.usefixtures("_small")
def test_contenders_compute_the_same():
    compared = set()
    for case in ops_cases.cases(ops_cases.OPERATORS, ["fp32"], 4, 1.0, torch.device("cpu")):
        ours, torchs = (result if isinstance(result, tuple) else (result,) for result in (case.ours(), case.torchs()))
        compared.add((case.operator, case.what.split()[-1]))
        if case.what.startswith("sigmoid") or (case.operator == "bias_gelu" and len(torchs) != len(ours)):
            # PyTorch has no sigmoid form. Where it gives the bias gradient alone, tests/ops compares that.
            continue
        for our_y, torchs_y in zip(ours[:1], torchs[:1], strict=True):
            torch.testing.assert_close(our_y, torchs_y, rtol=2e-4, atol=2e-5)
    assert compared == {(name, way) for name in ops_cases.OPERATORS[:3] for way in ("forward", "backward")} | {
        ("conv_bias_relu", "forward"), ("conv_bias_relu", "both")
    }  # fmt: skip


def test_flops_stand_over_operations_per_byte_under_the_roof():
    # 8 operations for each byte; 8 million in 100 microseconds are 80 GFLOP/s.
    row = {"what": "5x5 forward", "flops": 8e6, "bytes": 1e6, "ours_us": 100.0, "torch_us": 200.0}
    row |= {"dtype": "fp32", "threads": 1, "copy_gb_per_s": 20.0, "matmul_gflop_per_s": 100.0}
    (axis,) = roofline(pd.DataFrame([row])).axes
    roof = dict(zip(axis.lines[0].get_xdata(), axis.lines[0].get_ydata(), strict=True))
    # Copying at 20 GB/s meets a product's 100 GFLOP/s at 5 operations for each byte.
    assert roof == {4.0: 80.0, 5.0: 100.0, 16.0: 100.0}
    points = {c.get_label(): c.get_offsets().tolist() for c in axis.collections}
    assert (points["PyTorch, forward"], points["ours, forward"]) == ([[8.0, 40.0]], [[8.0, 80.0]])
