"""Which precisions a CPU has, with a torch that multiplies float8 there and with one that does not."""

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.precision import check_precision


@pytest.mark.parametrize("there", [True, False])
def test_fp8_on_a_cpu_is_a_question_of_torchs_version(there, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *key: bool(asked.append(key)) or there
    )
    if there:
        check_precision("fp8", torch.device("cpu"))
    else:
        with pytest.raises(ConfigError, match="has no float8 product for a CPU, in --precision, use torch 2"):
            check_precision("fp8", torch.device("cpu"))
    assert asked == [("aten::_scaled_mm", "CPU")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpu_has_these_in_every_torch(precision):
    check_precision(precision, torch.device("cpu"))
