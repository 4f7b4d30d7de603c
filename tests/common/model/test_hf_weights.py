"""Weights to and from transformers' models."""

import dataclasses

import pytest
import torch

from gptscale.common.model.hf_weights import from_hf, to_hf
from gptscale.common.settings.gpt_config import GPTConfig

SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_erf", "gelu_sigmoid"])
def test_transformers_gpt2_has_equal_logits_both_ways(ids, activation, random_model):
    pytest.importorskip("transformers")
    model = random_model(dataclasses.replace(SMALL, activation=activation)).eval()
    hf = to_hf(model).eval()
    with torch.no_grad():
        ours, theirs = model(ids[:, :-1]), hf(ids[:, :-1]).logits
        back = from_hf(hf).eval()(ids[:, :-1])
    assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, theirs.abs().max())
    assert torch.equal(ours, back)


def test_from_hf_starts_from_transformers_own_random_weights(ids):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=48, vocab_size=301)
    hf = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        assert (from_hf(hf).eval()(ids) - hf(ids).logits).abs().max() <= 1e-5


LLAMA = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
REFUSED = {
    "n_inner 64": ("GPT2", {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_inner": 64, "vocab_size": 301}),
    "biases True": ("Llama", LLAMA | {"intermediate_size": 48, "attention_bias": True}),
    "no family here has models of type opt": ("OPT", LLAMA | {"ffn_dim": 64}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_from_hf_refuses_what_it_would_get_wrong(said):
    transformers = pytest.importorskip("transformers", minversion="5", reason="the layouts are those of transformers 5")
    kind, sizes = REFUSED[said]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with pytest.raises(ValueError, match=said):
        from_hf(transformers.AutoModelForCausalLM.from_config(config))
