"""The matrix products of a step, and the floors of its parts."""

from __future__ import annotations

import pytest
import torch

from benchmarks.model import ceilings as model_ceilings
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig

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


def test_floors_of_the_contractual_shape():
    """Against docs/measurements/bench_model.md: 790 TFLOP/s and 4.3 TB/s make 11.8 us of products per token."""
    gpt, rows = PRESETS["1.6b"], 33 * 1024
    product_s = {f"{p.name} {p.how}": {"mm": p.flops / 790e12} for p in model_ceilings.products(gpt, rows)}
    least = model_ceilings.floors(gpt, rows, {"products": product_s, "copy_bytes_per_s": 4.3e12}, torch.bfloat16)
    us = {part: seconds / rows * 1e6 for part, seconds in least.items()}
    assert us["matrix products"] == pytest.approx(11.82, abs=0.01)
    assert us["attention"] == pytest.approx(0.60, abs=0.01)
    assert us["elementwise"] == pytest.approx(1.29, abs=0.01)
    assert us["loss"] == pytest.approx(0.047, abs=0.001)
    assert us["optimizer"] == pytest.approx(0.343, abs=0.001)
    assert tuple(us) == model_ceilings.PARTS
