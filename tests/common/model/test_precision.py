"""Which precisions a CPU has."""

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.model.precision import check_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_cpu_has_these_in_every_torch(precision, run_on):
    check_precision(run_on(CPU, precision=precision))


def test_a_cpu_has_no_fp16(run_on):
    with pytest.raises(ConfigError, match="fp16 needs a GPU, in --precision, use fp32 or bf16 on CPU"):
        check_precision(run_on(CPU, precision="fp16"))


def test_bf16_needs_a_gpu_of_ampere(monkeypatch, run_on):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="use fp16, which scales its loss"):
        check_precision(run_on(torch.device("cuda", 0), precision="bf16"))
    check_precision(run_on(torch.device("cuda", 0), precision="fp16"))
    check_precision(run_on(torch.device("cpu"), precision="bf16"))
