"""What a processor multiplies in hardware."""

import pytest
import torch

from gptscale.common.measure import devices
from gptscale.common.measure.devices import CPU_INSTRUCTIONS, cpu_flags, is_emulated
from gptscale.common.model.precision import emulation


def test_flags_of_a_processor(tmp_path):
    (tmp_path / "x86").write_text("processor\t: 0\nflags\t\t: fpu avx512f avx512_fp16\n")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp\n")
    assert cpu_flags(tmp_path / "x86") == {"fpu", "avx512f", "avx512_fp16"}
    assert cpu_flags(tmp_path / "arm") & CPU_INSTRUCTIONS["fp16"] == {"asimdhp"}
    assert cpu_flags(tmp_path / "nowhere") == set()


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
