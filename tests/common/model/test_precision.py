"""Which precisions a CPU has."""

import pytest
import torch

from gptscale.common.errors import ConfigError
from gptscale.common.model.precision import check_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_cpu_has_these_in_every_torch(precision):
    check_precision(precision, CPU)


def test_a_cpu_has_no_fp16():
    with pytest.raises(ConfigError, match="fp16 needs a GPU, in --precision, use fp32 or bf16 on CPU"):
        check_precision("fp16", CPU)
