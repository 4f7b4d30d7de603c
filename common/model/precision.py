"""What fp32, bf16, fp16 and fp8 mean here: weights and optimizer state stay fp32, products run in the named type.

fp8 is bf16 but for the matrix products of the blocks, which common/model/float8.py makes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import supports_bf16, supports_fp8
from gptscale.common.settings.run_config import Precision

# What autocast, and a strategy that casts weights itself, compute in; in fp8 the blocks' products alone differ.
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def check_precision(precision: Precision, device: torch.device) -> None:
    """ConfigError for a precision that the device has no fast or no correct arithmetic for."""
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("fp16 needs a GPU", "in --precision", "use fp32 or bf16 on CPU")
    if precision == "bf16" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if not supports_bf16(capability):
            name = f"compute capability {capability[0]}.{capability[1]}"
            raise ConfigError(
                f"bf16 needs Ampere (8.0) or newer, not {name}", "in --precision", "use fp16, which scales its loss"
            )
    if precision == "fp8":
        _check_fp8(device)


def _check_fp8(device: torch.device) -> None:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if not supports_fp8(capability):
            raise ConfigError(
                f"fp8 needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or newer, this one has "
                f"{capability[0]}.{capability[1]}",
                "in --precision",
                "use bf16",
            )


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The context a forward runs in: none for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])  # type: ignore[return-value]


class LossScale:
    """fp16's dynamic loss scale (Micikevicius et al. 2018, arXiv 1710.03740), kept on the device: no host sync.

    A step that overflows is skipped and halves the scale; `GROWTH_INTERVAL` good steps double it. Every rank sees the same
    global gradient norm, so every rank decides alike. For other precisions it is 1 and stays 1.
    """

    START, FLOOR, CEILING, GROWTH_INTERVAL = 2.0**16, 1.0, 2.0**24, 2000

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.value = torch.tensor(self.START if self.dynamic else 1.0, device=device)
        self.good_steps = torch.tensor(0.0, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Account for one step; `overflowed` is a boolean scalar on the device."""
        if not self.dynamic:
            return
        self.good_steps = torch.where(overflowed, 0.0, self.good_steps + 1)
        grow = self.good_steps >= self.GROWTH_INTERVAL
        factor = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0))
        self.good_steps = torch.where(grow, 0.0, self.good_steps)
        self.value = (self.value * factor).clamp(self.FLOOR, self.CEILING)
