"""Activation checkpointing, which activations of a block are kept for backward and which computed again, and compilation.

Chen et al. 2016, arXiv 1604.06174. Both `apply_` functions change `block.forward` in place, so parameter names stay canonical
and hooks that a strategy puts around the block (FSDP) are not recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gptscale.common.model import float8

aten = torch.ops.aten
# Selective: keep what is expensive per byte, matrix products and attention, by whichever kernel (math: products); recompute
# norms, GELU, adds, dropout.
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
    """`none`, `full` (keep only each block's input) or `selective` (keep the outputs of `KEPT_OPERATORS`)."""
    if mode == "none":
        return
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_OPERATORS)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
