"""Initial weights: a function of name and seed, whatever the cut."""

import torch

from gptscale.common.model.gpt import GPT
from gptscale.common.model.initial_weights import init_tensor, init_weights
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.state import Shard, shard_of

SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)


def test_weights_are_a_function_of_name_and_seed_whatever_the_cut():
    whole = init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=5)
    part = torch.empty(10, 64)
    init_weights([Shard("model/blocks.1.attn.qkv.weight", part, (192, 64), (100, 0))], SMALL, seed=5)
    assert torch.equal(part, whole[100:110])
    assert not torch.equal(whole, init_tensor("blocks.0.attn.qkv.weight", (192, 64), SMALL, seed=5))
    assert not torch.equal(whole, init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=6))


def test_initial_loss_is_that_of_chance_and_padding_rows_are_zero(ids):
    model = GPT(SMALL)
    init_weights((shard_of(f"model/{n}", p) for n, p in model.named_parameters()), SMALL, seed=1)
    assert torch.equal(model.wte.weight[301:], torch.zeros(384 - 301, 64))
    loss = model(ids[:, :-1], ids[:, 1:]) / 64
    assert abs(loss.item() - torch.log(torch.tensor(301.0)).item()) < 0.1
