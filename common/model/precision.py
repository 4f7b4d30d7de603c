"""What fp32, bf16, fp16 and fp8 mean here.

Weights and optimizer state stay in fp32. The forward and backward passes compute in the named type under autocast. fp8 is
bf16 except for the matrix products of the blocks, which common/model/float8.py computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import is_emulated, supports_bf16, supports_fp8
from gptscale.common.settings.run_config import Precision

# The type that autocast computes in, and that weights have where a strategy casts them itself.
DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ConfigError if a device has no fast or no correct arithmetic for a precision of the GPT."""
    where = "in --precision"
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError("fp16 needs a GPU", where, "use fp32 or bf16 on CPU")
    if device.type != "cuda" or precision not in ("bf16", "fp8"):
        return
    capability = torch.cuda.get_device_capability(device)
    major, minor = capability
    if precision == "bf16" and not supports_bf16(capability):
        what = f"bf16 needs Ampere (8.0) or newer, not compute capability {major}.{minor}"
        raise ConfigError(what, where, "use fp16, which scales its loss")
    if precision == "fp8" and not supports_fp8(capability):
        what = f"fp8 needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or newer, this one has {major}.{minor}"
        raise ConfigError(what, where, "use bf16")


def emulation(precision: str, device: torch.device) -> list[str]:
    """Return the line to print for a precision that this processor has to emulate, or no line for any other."""
    if device.type == "cpu" and precision == "fp8":
        return ["fp8      emulated by the CPU: right, and slow; no time of this run says anything of fp8"]
    if device.type == "cpu" and is_emulated(precision):
        return [
            f"{precision}     emulated by this processor, which has no instructions for it: many times slower than fp32"
        ]
    return []


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Return the context that a forward pass runs in, which does nothing for fp32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])  # type: ignore[return-value]


class LossScale:
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, arXiv 1710.03740).

    It lives on the device, so that the host never waits for it. A step that overflows is skipped and halves the scale.
    `GROWTH_INTERVAL` good steps in a row double it. Every rank sees the same global gradient norm, so all ranks decide alike. In
    other precisions the scale is 1 and stays 1.
    """

    START, FLOOR, CEILING, GROWTH_INTERVAL = 2.0**16, 1.0, 2.0**24, 2000

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.value = torch.tensor(self.START if self.dynamic else 1.0, device=device)
        self.good_steps = torch.tensor(0.0, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Adapt the scale to one step, given a boolean scalar on the device that says whether the step overflowed."""
        if not self.dynamic:
            return
        self.good_steps = torch.where(overflowed, 0.0, self.good_steps + 1)
        grow = self.good_steps >= self.GROWTH_INTERVAL
        factor = torch.where(overflowed, 0.5, torch.where(grow, 2.0, 1.0))
        self.good_steps = torch.where(grow, 0.0, self.good_steps)
        self.value = (self.value * factor).clamp(self.FLOOR, self.CEILING)
