"""Which precisions a CPU has."""

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.model.precision import check_precision

CPU = torch.device("cpu")


def test_a_cpu_has_every_precision_but_fp16(run_on):
    for precision in ("fp32", "bf16", "fp8"):
        check_precision(run_on(CPU, precision=precision))
    with pytest.raises(ConfigError, match="fp16 needs a GPU, in --precision, use fp32 or bf16 on CPU"):
        check_precision(run_on(CPU, precision="fp16"))


def test_bf16_needs_a_gpu_of_ampere(monkeypatch, run_on):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="use fp16, which scales its loss"):
        check_precision(run_on(torch.device("cuda", 0), precision="bf16"))
    check_precision(run_on(torch.device("cuda", 0), precision="fp16"))
