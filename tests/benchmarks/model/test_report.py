"""The figures of a report from given times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.model import ceilings as model_ceilings
from benchmarks.model import report as model_report
from benchmarks.model.__main__ import show
from benchmarks.model.options import ContenderResult, ModelBenchOptions, resolve
from benchmarks.model.report import Report
from gptscale.common.errors import GptscaleError
from gptscale.common.settings.gpt_config import PRESETS


def test_ratios_are_medians_over_rounds():
    bench = resolve(ModelBenchOptions(device="cpu", rounds=3))
    ours = ContenderResult("single", times_s=[[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]], losses=[1.0])
    other = ContenderResult("handout", times_s=[[1.5, 1.5], [2.0, 2.0], [1.4, 1.4]], losses=[1.0])
    names = [f"{p.name} {p.how}" for p in model_ceilings.products(bench.gpt, bench.tokens)]
    # There are 12 products in each of 6 layers, and 3 of the head.
    ceilings = [
        {"products": dict.fromkeys(names, {"mm": 0.9 / 75 * f, "onednn": 0.8 / 75 * f}), "copy_bytes_per_s": 1e9}
        for f in (1, 2, 3)
    ]
    ratios = Report(bench, [ours, other], ceilings, "").ratios()
    assert ratios["over_handout"] == pytest.approx(1.4)
    assert ratios["gemm_time_over_step_time"] == pytest.approx(0.8)
    assert ratios["share_of_gemm_rate"] == pytest.approx(0.8 * 183_032_064 / 179_601_408)
    assert ratios["share_of_mm_rate"] == pytest.approx(0.9 * 183_032_064 / 179_601_408)
    # Products and attention at their rate, logits read and written at that of a copy, and more.
    least = [sum(model_ceilings.floors(bench.gpt, bench.tokens, c, torch.float32).values()) for c in ceilings]
    assert least[0] > 0.8 * (1 + 3_538_944 / 179_601_408) + 2 * 2048 * 50304 * 4 / 1e9
    assert ratios["share_of_roofline"] == pytest.approx(sorted([least[0] / 1, least[1] / 2, least[2] / 1])[1])


def test_fp8_has_figures_of_its_own_and_is_never_the_fastest_of_ours(monkeypatch, capsys):
    monkeypatch.setattr(model_report, "device_name", lambda device: "NVIDIA H200")
    bench = dataclasses.replace(
        resolve(ModelBenchOptions(device="cpu", dtype="bf16")), gpt=PRESETS["1.6b"], batch_size=33
    )
    times = {"single_compiled": 0.6, "single_graphs": 0.5, "single_fp8": 0.4, "minimal": 0.8}
    results = [ContenderResult(name, times_s=[[s, s]], losses=[1.0]) for name, s in times.items()]
    names = [f"{p.name} {p.how}" for p in model_ceilings.products(bench.gpt, bench.tokens)]
    report = Report(bench, results, [{"products": dict.fromkeys(names, {"mm": 1e-3}), "copy_bytes_per_s": 4e12}], "")
    assert report.ours.name == "single_graphs"
    rows = {f.name: report.row(f) for f in results}
    tflops = 33 * 1024 * 9.8016864e9 / 0.4 / 1e12
    assert rows["single_fp8"]["fp8_tflops"] == pytest.approx(tflops, rel=1e-6)
    assert [rows["single_fp8"][key] for key in ("tflops", "of_gemm_rate", "mfu")] == [None] * 3
    blocks = 6 * 12 * 48 * 1600**2
    least_s = 33 * 1024 * (blocks / 1979e12 + (9.8016864e9 - blocks) / 989.5e12)
    assert rows["single_fp8"]["fp8_mixed_utilisation"] == pytest.approx(least_s / 0.4, rel=1e-6)
    assert rows["single_fp8"]["over_ours"] == pytest.approx(0.8)
    assert rows["single_graphs"]["mfu"] == pytest.approx(tflops * 0.8 / 989.5, rel=1e-6)
    assert rows["single_graphs"]["fp8_tflops"] is rows["single_graphs"]["fp8_mixed_utilisation"] is None
    show(report)
    printed = capsys.readouterr().out
    assert (
        f"single_fp8: {tflops:.4g} bf16-equivalent TFLOP/s, {least_s / 0.4:.1%} of the mixed fp8 and bf16 peak"
        in printed
    )
    with pytest.raises(GptscaleError, match="no contender ran"):
        Report(bench, results[2:3], [], "")
