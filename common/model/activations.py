"""The activation function between the two matrices of an MLP, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_sigmoid(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the sigmoid form of GELU, in PyTorch's own operations."""
    return x * torch.sigmoid(1.702 * x)


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation called `name`, one of ACTIVATIONS in common/settings/gpt_config.py.

    gelu_* are PyTorch's functions. custom-* are the operators of gptscale.ops, which are compiled here if they are not yet.
    """
    if name.startswith("custom-"):
        from gptscale.ops import registry
        from gptscale.ops.gelu import gelu

        registry.ready()
        return partial(gelu, approximate=name.removeprefix("custom-"))  # type: ignore[arg-type]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "gelu_erf": F.gelu,
        "gelu_sigmoid": gelu_sigmoid,
    }
    return functions[name]
