"""The matrix products of a step, and the floors of its parts."""

from __future__ import annotations

import torch

from benchmarks.model import ceilings as model_ceilings
from gptscale.common.settings.gpt_config import GPTConfig

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=301)


def test_products_are_the_operations_of_a_step():
    """Three for each matrix: 6 N_matmul operations per token, the table with its padding rows."""
    rows, gpt = 64, TINY
    flops = sum(p.per_step * p.flops for p in model_ceilings.products(gpt, rows))
    assert flops == 6 * rows * (12 * gpt.n_layer * gpt.n_embd**2 + gpt.padded_vocab_size * gpt.n_embd)
    for p in model_ceilings.products(gpt, rows):
        calls = model_ceilings.routes(p, torch.float32, torch.device("cpu"))
        assert calls["mm"]().shape == (p.m, p.n)
        # oneDNN computes the same, for a weight's gradient the transpose.
        if "onednn" in calls:
            result = calls["onednn"]()
            torch.testing.assert_close(
                result.t() if p.how == "grad-weight" else result, calls["mm"](), rtol=1e-4, atol=1e-4
            )
