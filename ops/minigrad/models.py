"""Three models for images of 28 x 28 pixels and ten classes: two linear layers, one convolution, and LeNet-5."""

from __future__ import annotations

from typing import Literal

import torch

from gptscale.ops.minigrad.layers import (
    Convolution,
    ConvReLU,
    Flatten,
    Linear,
    MaxPool,
    Module,
    ReLULayer,
    Sequential,
)

ModelName = Literal["pure_linear", "simple_conv", "LeNet"]


def pure_linear(random: torch.Generator) -> Module:
    """Build two linear layers with 100 hidden units: 79,510 parameters."""
    return Sequential(Flatten(), Linear(28 * 28, 100, random), ReLULayer(), Linear(100, 10, random))


def simple_conv(random: torch.Generator, *, convolution: Convolution = "kernel") -> Module:
    """Build one convolution, with a single filter of 5 x 5, and two linear layers: 79,536 parameters."""
    return Sequential(
        # 28 x 28
        ConvReLU(1, 1, 5, random, padding=2, convolution=convolution),
        Flatten(),
        Linear(28 * 28, 100, random),
        ReLULayer(),
        Linear(100, 10, random),
    )


def lenet(random: torch.Generator, *, convolution: Convolution = "kernel", pool_backward: str = "auto") -> Module:
    """Build LeNet-5 (LeCun et al. 1998) with max pooling and ReLU, as is usual today: 61,706 parameters."""
    return Sequential(
        # 28 x 28
        ConvReLU(1, 6, 5, random, padding=2, convolution=convolution),
        # 14 x 14
        MaxPool(2, backward=pool_backward),
        # 10 x 10
        ConvReLU(6, 16, 5, random, convolution=convolution),
        # 5 x 5
        MaxPool(2, backward=pool_backward),
        Flatten(),
        Linear(16 * 5 * 5, 120, random),
        ReLULayer(),
        Linear(120, 84, random),
        ReLULayer(),
        Linear(84, 10, random),
    )


def build(
    name: ModelName, *, seed: int = 0, convolution: Convolution = "kernel", pool_backward: str = "auto"
) -> Module:
    """Build the model of that name, with weights that depend on the seed alone."""
    random = torch.Generator().manual_seed(seed)
    if name == "pure_linear":
        return pure_linear(random)
    if name == "simple_conv":
        return simple_conv(random, convolution=convolution)
    return lenet(random, convolution=convolution, pool_backward=pool_backward)
