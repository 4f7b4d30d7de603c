"""The activation of a vision model, by name: ReLU, GELU in its three formulas from torch, and the same from this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Gelu = Literal["erf", "tanh", "sigmoid", "custom-erf", "custom-tanh", "custom-sigmoid"]
GELUS: tuple[str, ...] = get_args(Gelu)


class Activation(nn.Module):
    """An element-wise function as a module, so that a printed model tells which one it has."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


def scaled_tanh(x: Tensor) -> Tensor:
    """1.7159 tanh(2x/3), of LeCun et al. 1998, "Gradient-based learning applied to document recognition", appendix A."""
    return 1.7159 * torch.tanh(x * (2 / 3))


def gelu_sigmoid(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), the rougher of the two approximations in Hendrycks & Gimpel 2016 (arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def activation(gelu: str | None, default: str = "relu") -> Activation:
    """The module for `gelu`, one of GELUS, or for `default` (relu or scaled-tanh) when it is None.

    erf and tanh are torch's own operators; custom-* are those of gptscale.ops. The two sets are the same functions.
    """
    name = default if gelu is None else f"gelu-{gelu}"
    if gelu is not None and gelu.startswith("custom-"):
        return Activation(name, _custom(gelu.removeprefix("custom-")))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "scaled-tanh": scaled_tanh,
        "gelu-erf": F.gelu,
        "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu-sigmoid": gelu_sigmoid,
    }
    return Activation(name, functions[name])


def _custom(variant: Any) -> Callable[[Tensor], Tensor]:
    # here, since it may compile an operator, which only a model that asks for it should wait for
    from gptscale.ops.gelu import gelu

    return lambda x: gelu(x, variant)
