"""Models of every family against transformers' own classes, and weights to and from them."""

import dataclasses

import pytest
import torch

from gptscale.common.model.hf_weights import from_hf, to_hf
from gptscale.common.settings.families import in_transformers, preset
from gptscale.common.settings.gpt_config import GPTConfig

GPT2 = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=128, vocab_size=301)
LLAMA = dataclasses.replace(preset("llama-tiny"), n_layer=2, vocab_size=301)
VARIANTS = {
    **{name: ("GPT2LMHeadModel", dataclasses.replace(GPT2, activation=name)) for name in GPT2.activations[:3]},
    "scaled positions": ("LlamaForCausalLM", LLAMA),
    "plain positions": ("LlamaForCausalLM", dataclasses.replace(LLAMA, rope_scaling=None)),
    "tied head": ("LlamaForCausalLM", dataclasses.replace(LLAMA, has_head=False)),
    "normed queries and keys": (
        "Qwen3ForCausalLM",
        dataclasses.replace(preset("qwen3-tiny"), n_layer=2, n_embd=64, n_inner=96, vocab_size=301),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_classes_have_equal_logits_and_gradients_both_ways(ids, variant, random_model, tmp_path):
    class_name, config = VARIANTS[variant]
    newest = {} if config.family == "gpt2" else {"minversion": "5", "reason": "the layouts are those of transformers 5"}
    transformers = pytest.importorskip("transformers", **newest)
    model, ids = random_model(config), ids.repeat(1, 3)
    to_hf(model).save_pretrained(tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf).__name__ == class_name
    ours, theirs = model(ids[:, :-1]), hf(ids[:, :-1]).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    loss = model(ids[:, :-1], ids[:, 1:])
    expected = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    loss.backward()
    expected.backward()
    layout, own, others = in_transformers(config.family), dict(model.named_parameters()), dict(hf.named_parameters())
    for weight, name, hf_name in config.parameters():
        grad = others[hf_name].grad
        found = layout.to_hf(own[name].grad, weight, config)[: len(grad)]
        assert (found - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    back = from_hf(hf)
    assert dataclasses.replace(back.config, lr=config.lr) == config
    assert torch.equal(back(ids[:, :-1]), ours)


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
REFUSED = {
    "n_inner 64": ("GPT2", {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_inner": 64, "vocab_size": 301}),
    "biases True": ("Llama", SIZES | {"intermediate_size": 48, "attention_bias": True}),
    "no family here has models of type opt": ("OPT", SIZES | {"ffn_dim": 64}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_from_hf_refuses_what_it_would_get_wrong(said):
    transformers = pytest.importorskip("transformers", minversion="5", reason="the layouts are those of transformers 5")
    kind, sizes = REFUSED[said]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with pytest.raises(ValueError, match=said):
        from_hf(transformers.AutoModelForCausalLM.from_config(config))
