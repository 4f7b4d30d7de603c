"""Activation checkpointing: which activations of a block are kept for backward, and which are computed again.

Chen et al. 2016, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from gptscale.common.model import float8

aten = torch.ops.aten
# The mode `selective` keeps what costs much time for the bytes it takes: matrix products, and attention by any kernel (the kernel
# `math` consists of products). LayerNorm, GELU, additions and dropout are computed again.
KEPT_OPERATORS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    *float8.OPERATORS,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def apply_activation_checkpointing(blocks: Iterable[nn.Module], mode: str) -> None:
    """Change the forward of each block in place, so that it keeps fewer activations for backward.

    mode: `none` changes nothing, `full` keeps only the input of the block, `selective` also the outputs of `KEPT_OPERATORS`.

    `block.forward` is replaced, and the block is not wrapped. Parameter names stay as they are, and the hooks that a strategy
    puts around the block (FSDP) do not run again in the recomputation.
    """
    if mode == "none":
        return
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_OPERATORS)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
