"""The activation between an MLP's two matrices, by name: PyTorch's own, or the package's operators of the same function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_sigmoid(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), in PyTorch's own operations."""
    return x * torch.sigmoid(1.702 * x)


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The function called `name`, one of model_config.ACTIVATIONS; custom-* are compiled here if they are not yet."""
    if name.startswith("custom-"):
        from gptscale.ops import registry as library
        from gptscale.ops.gelu import gelu

        library.ready()
        return partial(gelu, approximate=name.removeprefix("custom-"))  # type: ignore[arg-type]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "gelu_erf": F.gelu,
        "gelu_sigmoid": gelu_sigmoid,
    }
    return functions[name]
