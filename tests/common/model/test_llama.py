"""Llama's family against transformers' own classes, torch's counter of operations, and its list of weights."""

import dataclasses
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptscale.common.engines.tensor_parallel import check_tp
from gptscale.common.errors import ConfigError
from gptscale.common.measure.flops import hardware_flops_per_token, model_flops_per_token
from gptscale.common.model.build import apply_activation_checkpointing
from gptscale.common.model.hf_weights import from_hf, to_hf
from gptscale.common.settings.families import FAMILIES, MODELS, model_class, preset
from gptscale.common.settings.run_config import RunConfig

SMALL = dataclasses.replace(preset("qwen3-tiny"), n_layer=2, n_embd=64, n_inner=96, vocab_size=301)
VARIANTS = {
    "scaled positions": dataclasses.replace(preset("llama-tiny"), n_layer=2, vocab_size=301),
    "plain positions": dataclasses.replace(preset("llama-tiny"), n_layer=2, vocab_size=301, rope_scaling=None),
    "tied head": dataclasses.replace(preset("llama-tiny"), n_layer=2, vocab_size=301, has_head=False),
    "normed queries and keys": SMALL,
}
# As the model cards have them, and as transformers counts.
PUBLISHED = {
    "smollm-135m": 134_515_008,
    "llama-1b": 1_100_048_384,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_list_of_weights_is_that_of_the_model(name):
    config = preset(name)
    with torch.device("meta"):
        model = model_class(config)(config)
    listed = [(name, weight.shape) for weight, name, _ in config.parameters()]
    assert listed == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert config.n_params_in_memory == sum(p.numel() for p in model.parameters())
    assert config.n_params == PUBLISHED.get(name, config.n_params)


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.presets])
def test_a_familys_row_names_its_presets(name):
    module = import_module(f"gptscale.common.settings.{FAMILIES[name].config}")
    assert FAMILIES[name].presets.split() == list(module.PRESETS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_classes_have_equal_logits_and_gradients_both_ways(ids, variant, random_model, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5", reason="the layouts are those of transformers 5")
    model, ids = random_model(VARIANTS[variant]), ids.repeat(1, 3)
    to_hf(model).save_pretrained(tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf).__name__ == ("Qwen3ForCausalLM" if model.config.qk_norm else "LlamaForCausalLM")
    ours, theirs = model(ids[:, :-1]), hf(ids[:, :-1]).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    model(ids[:, :-1], ids[:, 1:]).backward()
    torch.nn.functional.cross_entropy(theirs.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    gradients, expected = dict(model.named_parameters()), dict(hf.named_parameters())
    for _, name, hf_name in model.config.parameters():
        grad = expected[hf_name].grad
        assert (gradients[name].grad[: len(grad)] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    back = from_hf(hf)
    assert dataclasses.replace(back.config, lr=model.config.lr) == model.config
    assert torch.equal(back(ids[:, :-1]), ours)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_operations_per_token_are_those_that_torch_counts(ids, mode, random_model):
    """The counter sees attention over the full square, of which the formula has half, and not the head's products by oneDNN."""
    config = dataclasses.replace(SMALL, vocab_size=384)
    model, counter = random_model(config), FlopCounterMode(display=False)
    apply_activation_checkpointing(model.blocks, mode)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(ids[:, :-1], ids[:, 1:]).backward()
    recomputed = hardware_flops_per_token(config, 32, mode) - model_flops_per_token(config, 32)
    half_square = (4 if mode == "full" else 3) * config.n_layer * 2 * 192 * 32
    expected = model_flops_per_token(config, 32) + recomputed + half_square - 6 * 384 * 64
    assert counter.get_total_flops() / 64 == expected


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"model": "llama3-9b"}, "unknown model 'llama3-9b', in --model, .*llama3-8b"),
        ({"model": "llama-tiny", "activation": "gelu_erf"}, "unknown activation 'gelu_erf', .*: silu"),
        ({"model": "llama3-8b", "n_head": 12}, "n_head 12 is not divisible by the 8 heads of keys .*--n-head 16"),
    ],
)
def test_options_that_the_family_does_not_have_are_refused(options, what):
    with pytest.raises(ConfigError, match=what):
        RunConfig(**options)


def test_tensor_ranks_that_do_not_divide_heads_of_keys_are_refused():
    run = SimpleNamespace(tp_size=4, seq_len=128, gpt=preset("llama-tiny"))
    with pytest.raises(ConfigError, match=r"n_kv_head 2 is not divisible by tp_size 4, .*use one of \[1, 2\]"):
        check_tp(run)
