"""Which precisions a device has."""

from contextlib import nullcontext

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import supports_fp8
from gptscale.common.model.precision import check_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_cpu_has_every_precision_but_fp16():
    for precision in ("fp32", "bf16", "fp8"):
        check_precision(precision, CPU)
    with pytest.raises(ConfigError, match="fp16 needs a GPU, in --precision, use fp32 or bf16 on CPU"):
        check_precision("fp16", CPU)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
def test_bf16_needs_a_gpu_of_ampere_and_fp8_one_of_ada(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_precision("fp16", CUDA)
    with pytest.raises(ConfigError, match="use fp16, which scales") if capability < (8, 0) else nullcontext():
        check_precision("bf16", CUDA)
    said = "or newer, this one has {}.{}, in --precision, use bf16".format(*capability)
    with pytest.raises(ConfigError, match=said) if capability < (8, 9) else nullcontext():
        check_precision("fp8", CUDA)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    # The e4m3 of this AMD GPU is another format.
    assert not supports_fp8((9, 4))
