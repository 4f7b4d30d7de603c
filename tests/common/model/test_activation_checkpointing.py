"""What activation checkpointing recomputes, and that it changes no bit."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptscale.common.model.activation_checkpointing import KEPT_OPERATORS, apply_activation_checkpointing
from gptscale.common.model.float8 import apply_float8


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(ids, mode, precision, random_model):
    plain, checkpointed = random_model(std=0.05), random_model(std=0.05)
    if precision == "fp8":
        apply_float8([*plain.blocks, *checkpointed.blocks])
    apply_activation_checkpointing(checkpointed.blocks, mode)
    losses = []
    for model in (plain, checkpointed):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "fp8"):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    assert list(dict(plain.named_parameters())) == list(dict(checkpointed.named_parameters()))
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def recomputed_flops(model, mode, ids):
    apply_activation_checkpointing(model.blocks, mode)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(ids[:, :-1], ids[:, 1:]).backward()
    return counter.get_total_flops()


def test_full_recomputes_every_block_and_selective_no_product(ids, random_model):
    none, selective, full = (recomputed_flops(random_model(), m, ids) for m in ("none", "selective", "full"))
    assert selective == none
    # 8 h^2 of a block's 12: recomputation ends before the last product, whose output backward does not need
    assert full - none == 2 * 8 * 3 * 64**2 * 64 + 4 * 3 * 64 * 32 * 32 * 2


def test_selective_checkpointing_keeps_what_every_kernel_returns():
    kept = {str(operator) for operator in KEPT_OPERATORS}
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        assert f"aten._scaled_dot_product_{name}.default" in kept
    # The kernel called math is made of these.
    assert {"aten.bmm.default", "aten.mm.default"} <= kept
