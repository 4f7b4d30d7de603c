"""Schedule, FLOP counts, device peaks, precision, speed and memory: small pure functions with known answers."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptscale.common.measure import devices
from gptscale.common.measure.devices import CPU_INSTRUCTIONS, cpu_flags, is_emulated, peak_tflops
from gptscale.common.measure.flops import (
    handout_flops_per_token,
    handout_n_params,
    hardware_flops_per_token,
    model_flops_per_token,
    palm_flops_per_token,
)
from gptscale.common.measure.speed import peak_memory, speed
from gptscale.common.model.precision import emulation
from gptscale.common.settings.gpt_config import PRESETS
from gptscale.common.settings.learning_rate import learning_rate
from gptscale.common.settings.run_config import RunConfig

BIG = PRESETS["1.6b"]


@given(step=st.integers(0, 999), warmup=st.integers(0, 500), schedule=st.sampled_from(["cosine", "constant", "wsd"]))
def test_rate_stays_between_zero_and_peak(step, warmup, schedule):
    rate = learning_rate(step, peak=2.0, total_steps=1000, warmup_steps=warmup, schedule=schedule)
    assert 0 < rate <= 2.0


def test_schedule_at_its_corners():
    def rate(step, **changes):
        return learning_rate(step, **{"peak": 1.0, "total_steps": 101, "warmup_steps": 10, **changes})

    assert [rate(s) for s in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    # Step 55 is half way down.
    assert rate(55) == pytest.approx(0.1 + 0.9 * 0.5)
    assert rate(100) == rate(5000) == pytest.approx(0.1)
    assert rate(100, min_ratio=0.0) == pytest.approx(0.0)
    assert rate(100, schedule="constant") == 1.0
    assert [rate(s, schedule="wsd") for s in (9, 90, 95, 100, 5000)] == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])
    assert [rate(s, schedule="wsd", decay_from=60) for s in (60, 80, 100)] == pytest.approx([1.0, 0.55, 0.1])
    assert learning_rate(0, peak=1.0, total_steps=1) == 1.0


def test_flops_of_the_contractual_shape():
    assert model_flops_per_token(BIG, 1024) == 9_801_686_400
    assert palm_flops_per_token(BIG, 1024) == 10_289_385_600
    assert handout_n_params(BIG) == 1_638_022_400
    assert handout_flops_per_token(BIG) / palm_flops_per_token(BIG, 1024) == pytest.approx(1.27, abs=0.005)
    padding = 6 * (50304 - 50257) * 1600
    assert hardware_flops_per_token(BIG, 1024) == 9_801_686_400 + padding


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA GeForce RTX 2080 Ti", "fp16", 53.8),
        ("NVIDIA GeForce RTX 2080 Ti", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Some Future GPU", "bf16", None),
        ("NVIDIA A1000 Laptop GPU", "bf16", None),
        ("NVIDIA T400 4GB", "fp32", None),
        ("cpu: AMD EPYC H200", "fp32", None),
    ],
)
def test_peaks(name, precision, peak):
    assert peak_tflops(name, precision) == peak


def measured(step_times_s, waits_s=(0.0,), device="NVIDIA H100", tokens_per_step=1000, world_size=2):
    world, config = SimpleNamespace(world_size=world_size), RunConfig(precision="bf16")
    run = SimpleNamespace(gpt=BIG, seq_len=1024, tokens_per_step=tokens_per_step, world=world, config=config)
    return speed(run, device, step_times_s, waits_s)


def test_full_peak_is_mfu_one():
    """100 % of 989.5 TFLOP/s is 100,952 tokens/s for `1.6b`."""
    found = measured([1.0], tokens_per_step=100_952, world_size=1)
    assert found["mfu"] == pytest.approx(1.0, abs=1e-5)
    assert found["tflops_per_device"] == pytest.approx(989.5, abs=0.01)
    assert found["mfu_palm"] / found["mfu"] == pytest.approx(1.0498, abs=1e-4)


def test_rates_come_from_the_median_step():
    found = measured([1.0, 2.0, 100.0], [0.1, 0.2, 0.7])
    assert found["step_time_s_median"] == 2.0
    assert found["tokens_per_s"] == 500
    assert found["tokens_per_s_per_device"] == 250
    assert found["step_time_s_p10"] < 2.0 < found["step_time_s_p90"]
    assert found["data_wait_fraction"] == pytest.approx(1.0 / 103.0)


def test_unknown_stays_unknown():
    assert measured([]) == {}
    found = measured([1.0], device="cpu")
    assert found["mfu"] is found["mfu_palm"] is found["hfu"] is None
    assert found["tflops_per_device"] > 0


def test_memory_of_a_cpu_process():
    found = peak_memory(torch.device("cpu"))
    assert found["peak_mem_allocated_gib"] is found["peak_mem_reserved_gib"] is None
    assert 0.05 < found["peak_rss_gib"] < 100


def test_flags_of_a_processor(tmp_path):
    (tmp_path / "x86").write_text("processor\t: 0\nflags\t\t: fpu avx512f avx512_fp16\n")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp\n")
    assert cpu_flags(tmp_path / "x86") == {"fpu", "avx512f", "avx512_fp16"}
    assert cpu_flags(tmp_path / "arm") & CPU_INSTRUCTIONS["fp16"] == {"asimdhp"}


@pytest.mark.parametrize(
    ("flags", "emulated"),
    [({"avx2"}, {"bf16", "fp16"}), ({"avx512bw"}, {"fp16"}), ({"asimdhp", "bf16"}, set()), (set(), set())],
)
def test_a_precision_without_instructions_is_emulated_and_said(flags, emulated, monkeypatch):
    """Nothing is claimed of a processor whose flags are unknown."""
    monkeypatch.setattr(devices, "cpu_flags", lambda: flags)
    assert {name for name in ("fp32", "bf16", "fp16") if is_emulated(name)} == emulated
    lines = [emulation(name, torch.device("cpu")) for name in ("fp32", "bf16")]
    assert [bool(found) for found in lines] == [False, "bf16" in emulated]
    assert emulation("bf16", torch.device("cuda", 0)) == []
