"""Both contenders of a case compute the same."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from benchmarks.ops import cases as ops_cases
from benchmarks.ops.pictures import roofline

CPU = torch.device("cpu")


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(ops_cases, "POOLED", ((2, 16, 12, 12),))
    monkeypatch.setattr(ops_cases, "CONVOLVED", ((2, 1, 12, 8, 5, 1, 2, 1), (2, 4, 12, 4, 3, 2, 1, 4)))


@pytest.mark.usefixtures("_small")
def test_contenders_compute_the_same():
    compared = set()
    for case in ops_cases.cases(ops_cases.OPERATORS, ["fp32"], 4, 1.0, CPU):
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


COMMON = {"dtype": "fp32", "threads": 1, "copy_gb_per_s": 20.0, "matmul_gflop_per_s": 100.0}


def convolution(what, flops, n_bytes, ours_us, torch_us):
    figures = {"flops": flops, "bytes": n_bytes, "ours_us": ours_us, "torch_us": torch_us}
    return {"operator": "conv_bias_relu", "what": what, **figures, **COMMON}


def test_flops_stand_over_operations_per_byte_under_the_roof():
    # 8 and 2 operations for each byte; 8 million in 100 microseconds are 80 GFLOP/s.
    rows = [convolution("5x5 forward", 8e6, 1e6, 100.0, 200.0), convolution("5x5 both", 24e6, 12e6, 2000.0, 1000.0)]
    (axis,) = roofline(pd.DataFrame(rows)).axes
    roof = dict(zip(axis.lines[0].get_xdata(), axis.lines[0].get_ydata(), strict=True))
    # Copying at 20 GB/s meets a product's 100 GFLOP/s at 5 operations for each byte.
    assert roof == {1.0: 20.0, 5.0: 100.0, 16.0: 100.0}
    points = {c.get_label(): c.get_offsets().tolist() for c in axis.collections}
    assert points == {
        "PyTorch, forward": [[8.0, 40.0]],
        "ours, forward": [[8.0, 80.0]],
        "PyTorch, both": [[2.0, 24.0]],
        "ours, both": [[2.0, 12.0]],
    }
