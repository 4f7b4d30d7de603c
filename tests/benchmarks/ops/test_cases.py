"""Both contenders of a case compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.ops import cases as ops_cases

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
