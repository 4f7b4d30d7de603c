"""The GPT that is written by hand: what ours computes, from the same weights, and one step of it."""

import pytest
import torch

from benchmarks.model.minimal_gpt import MinimalGPT, make_step
from gptscale.common.model.gpt import GPT
from gptscale.common.model.hf_gpt2 import qkv_to_hf
from gptscale.common.settings.gpt_config import GPTConfig

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=30)
NAMES = {"attn.qkv": "c_attn", "attn.proj": "attn_proj", "mlp.fc": "c_fc", "mlp.proj": "mlp_proj", "blocks.": "h."}
CPU = torch.device("cpu")


@pytest.fixture
def models():
    """Ours and the minimal one, with the same weights, and with a part of the table that is padding."""
    torch.manual_seed(0)
    ours = GPT(CONFIG)
    minimal = MinimalGPT(
        n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=30, table_rows=CONFIG.padded_vocab_size
    )
    state = {}
    for name, value in ours.state_dict().items():
        state[renamed(name)] = qkv_to_hf(value, 2) if "qkv" in name else value
    minimal.load_state_dict({**state, "lm_head.weight": state["wte.weight"]})
    return ours, minimal


def renamed(name):
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def batch():
    ids = torch.randint(0, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:].clone()


def test_loss_and_gradients_are_ours(models):
    ours, minimal = models
    inputs, targets = batch()
    targets[0, :3] = -100
    loss = ours(inputs, targets) / 13
    minimal_loss = minimal(inputs, targets)
    torch.testing.assert_close(minimal_loss, loss)
    loss.backward()
    minimal_loss.backward()
    gradients = dict(minimal.named_parameters())
    for name, p in ours.named_parameters():
        expected = qkv_to_hf(p.grad, 2) if "qkv" in name else p.grad
        torch.testing.assert_close(gradients[renamed(name)].grad, expected, rtol=1e-4, atol=1e-6)


def test_a_step_clips_and_decays_matrices_alone(models):
    _, minimal = models
    inputs, targets = batch()
    before = {name: p.detach().clone() for name, p in minimal.named_parameters()}
    reference = MinimalGPT(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=30, table_rows=128)
    reference.load_state_dict(minimal.state_dict())
    step = make_step(minimal, lr=0.01, clip_grad_norm=0.1, compile=False, dtype=torch.float32, device=CPU)
    first, second = step(inputs, targets), step(inputs, targets)
    torch.testing.assert_close(first, reference(inputs, targets).detach())
    assert second < first
    assert all(p.grad is None for p in minimal.parameters())
    # Adam's first steps have the length of the rate, whatever the gradient, and lr x 0.1 is taken off a matrix.
    for name, p in minimal.named_parameters():
        largest = (p.detach() - before[name]).abs().max()
        assert 0 < largest <= 2 * 0.01 * 1.05 + 2 * 0.01 * 0.1 * before[name].abs().max() * (p.ndim > 1)
    padding = minimal.wte.weight[30:]
    torch.testing.assert_close(padding, before["wte.weight"][30:] * (1 - 0.01 * 0.1) ** 2)


def test_in_bf16_products_are_and_the_loss_is_not(models):
    _, minimal = models
    step = make_step(minimal, lr=0.0, clip_grad_norm=1.0, compile=False, dtype=torch.bfloat16, device=CPU)
    in_bf16 = step(*batch())
    in_fp32 = minimal(*batch()).detach()
    assert in_bf16.dtype == torch.float32
    assert in_bf16 != in_fp32
    torch.testing.assert_close(in_bf16, in_fp32, rtol=1e-2, atol=0)
