"""The activations of vision models by name: ReLU, scaled tanh, and three GELU formulas from torch and gptscale.ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.model.gpt import gelu_sigmoid


class Activation(nn.Module):
    """An element-wise function as a module, so that a printed model shows its name."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


def scaled_tanh(x: Tensor) -> Tensor:
    """Return 1.7159 tanh(2x/3).

    LeCun et al. 1998, "Gradient-based learning applied to document recognition", appendix A.
    """
    return 1.7159 * torch.tanh(x * (2 / 3))


def activation(gelu: str | None, default: str = "relu") -> Activation:
    """Return the module for `gelu`, one of GELUS, or for `default` (relu or scaled-tanh) when `gelu` is None.

    erf and tanh are torch's own operators, custom-* are those of gptscale.ops, and python-* are the same written in Python. All
    sets compute the same functions.
    """
    name = default if gelu is None else f"gelu-{gelu}"
    by, _, variant = (gelu or "").partition("-")
    if variant:
        # Imported here because it may compile an operator. Only a model that asks for it should wait for that.
        from gptscale.ops import gelu as operator

        implementation = "auto" if by == "custom" else by
        return Activation(name, lambda x: operator.gelu(x, variant, implementation))  # type: ignore[arg-type]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "scaled-tanh": scaled_tanh,
        "gelu-erf": F.gelu,
        "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu-sigmoid": gelu_sigmoid,
    }
    return Activation(name, functions[name])
