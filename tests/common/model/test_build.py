"""Building the GPT of a run: a shape without memory, then the weights that this process holds."""

import dataclasses
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptscale.common.measure.flops import hardware_flops_per_token
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import GPT
from gptscale.common.model.initial_weights import init_tensor, init_weights
from gptscale.common.settings.families import model_class, preset
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.state import Shard, shard_of

CPU = torch.device("cpu")
SHAPE = {"n_layer": 2, "n_embd": 32, "n_head": 4, "seq_len": 16, "vocab_size": 50, "dropout": 0.0}


@pytest.mark.parametrize(
    "options",
    [
        {"compile": True, "activation_checkpointing": "full"},
        {"precision": "fp8", "activation_checkpointing": "selective", "attention": "math"},
    ],
)
def test_no_option_changes_a_name_or_a_shape_and_nothing_takes_memory(options, run_on):
    run = run_on(CPU, **SHAPE, **options)
    model, plain = meta_gpt(run), GPT(run.gpt)
    assert all(p.is_meta for p in model.parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_each_weight_of_a_part_of_the_model_is_of_its_name_and_the_seed(run_on):
    run = run_on(CPU, **SHAPE, seed=7)
    model = meta_gpt(run)
    del model.blocks[1]
    for name, p in materialise(model, run, CPU).named_parameters():
        assert torch.equal(p, init_tensor(name, tuple(p.shape), run.gpt, 7)), name


SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)
SHAPES = [
    SMALL,
    *(dataclasses.replace(preset(name), n_layer=2, vocab_size=301) for name in ("qwen3-tiny", "llama-tiny")),
]
FAMILIES = ["gpt2", "qwen3", "llama"]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=FAMILIES[:2])
def test_activation_checkpointing_changes_no_bit_and_no_name(ids, shape, fp8, random_model):
    found = []
    for mode in ("none", "full", "selective"):
        model = random_model(shape, 0.05, fp8, mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=fp8):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append({"loss": loss} | {name: p.grad for name, p in model.named_parameters()})
    for other in found[1:]:
        assert list(other) == list(found[0])
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("shape", SHAPES, ids=FAMILIES)
def test_operations_per_token_are_those_that_torch_counts(ids, shape, mode, random_model):
    """The counter sees attention over the full square, of which the formula has half, and not the head's products by oneDNN."""
    config, counter = dataclasses.replace(shape, vocab_size=384), FlopCounterMode(display=False)
    model = random_model(config, checkpointing=mode)
    # The kernel is MATH, because the fused CPU kernel is not in the counter's table.
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(ids[:, :-1], ids[:, 1:]).backward()
    half_square = (4 if mode == "full" else 3) * config.n_layer * 2 * config.attention_width * 32
    expected = hardware_flops_per_token(config, 32, mode) + half_square - 6 * 384 * config.n_embd
    assert counter.get_total_flops() / 64 == expected


def test_weights_are_a_function_of_name_and_seed_whatever_the_cut():
    whole = init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=5)
    part = torch.empty(10, 64)
    init_weights([Shard("model/blocks.1.attn.qkv.weight", part, (192, 64), (100, 0))], SMALL, seed=5)
    assert torch.equal(part, whole[100:110])
    assert not torch.equal(whole, init_tensor("blocks.0.attn.qkv.weight", (192, 64), SMALL, seed=5))
    assert not torch.equal(whole, init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=6))


@pytest.mark.parametrize("shape", SHAPES, ids=FAMILIES)
def test_initial_loss_is_that_of_chance_and_padding_rows_are_zero(ids, shape):
    model = model_class(shape)(shape)
    init_weights((shard_of(f"model/{n}", p) for n, p in model.named_parameters()), shape, seed=1)
    assert not any(table.weight[301:].any() for table in (model.wte, model.head) if table)
    assert abs(model(ids[:, :-1], ids[:, 1:]).item() / 64 - math.log(301)) < 0.1
