"""Building the GPT of a run: a shape without memory, then the weights that this process holds."""

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptscale.common.model.build import KEPT_OPERATORS, apply_activation_checkpointing, materialise, meta_gpt
from gptscale.common.model.float8 import apply_float8
from gptscale.common.model.gpt import GPT
from gptscale.common.model.initial_weights import init_tensor, init_weights
from gptscale.common.settings.families import model_class, preset
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.common.state import Shard, shard_of

CPU = torch.device("cpu")
SHAPE = {"n_layer": 2, "n_embd": 32, "n_head": 4, "seq_len": 16, "vocab_size": 50, "dropout": 0.0}
OPTIONS = [
    {},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective", "attention": "math"},
    {"compile": True, "activation_checkpointing": "full"},
    {"precision": "fp8"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_no_option_changes_a_name_or_a_shape_and_nothing_takes_memory(options, run_on):
    run = run_on(CPU, **SHAPE, **options)
    model, plain = meta_gpt(run), GPT(run.gpt)
    assert all(p.is_meta for p in model.parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_each_weight_is_a_function_of_its_name_and_the_seed(run_on):
    run = run_on(CPU, **SHAPE, seed=7)
    model = materialise(meta_gpt(run), run, CPU)
    for name, p in model.named_parameters():
        assert torch.equal(p, init_tensor(name, tuple(p.shape), run.gpt, 7)), name


def test_a_part_of_the_model_has_the_weights_that_the_whole_has_there(run_on):
    run = run_on(CPU, **SHAPE)
    full, half = materialise(meta_gpt(run), run, CPU), meta_gpt(run)
    del half.blocks[1]
    materialise(half, run, CPU)
    parameters = dict(full.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in half.named_parameters())


def test_parameters_are_created_under_the_context_of_a_library(run_on):
    """DeepSpeed's zero.Init takes the place of the meta device."""
    model = meta_gpt(run_on(CPU, **SHAPE), under=nullcontext())
    assert all(p.device == CPU for p in model.parameters())


SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)
SHAPES = [
    SMALL,
    *(dataclasses.replace(preset(name), n_layer=2, vocab_size=301) for name in ("qwen3-tiny", "llama-tiny")),
]


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=["gpt2", "qwen3"])
def test_activation_checkpointing_changes_no_bit_and_no_name(ids, shape, precision, random_model):
    found = []
    for mode in ("none", "full", "selective"):
        model = random_model(shape, std=0.05)
        if precision == "fp8":
            apply_float8(model.blocks)
        apply_activation_checkpointing(model.blocks, mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "fp8"):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append({"loss": loss} | {name: p.grad for name, p in model.named_parameters()})
    for other in found[1:]:
        assert list(other) == list(found[0])
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


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


def test_weights_are_a_function_of_name_and_seed_whatever_the_cut():
    whole = init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=5)
    part = torch.empty(10, 64)
    init_weights([Shard("model/blocks.1.attn.qkv.weight", part, (192, 64), (100, 0))], SMALL, seed=5)
    assert torch.equal(part, whole[100:110])
    assert not torch.equal(whole, init_tensor("blocks.0.attn.qkv.weight", (192, 64), SMALL, seed=5))
    assert not torch.equal(whole, init_tensor("blocks.1.attn.qkv.weight", (192, 64), SMALL, seed=6))


@pytest.mark.parametrize("shape", SHAPES, ids=["gpt2", "qwen3", "llama"])
def test_initial_loss_is_that_of_chance_and_padding_rows_are_zero(ids, shape):
    model = model_class(shape)(shape)
    init_weights((shard_of(f"model/{n}", p) for n, p in model.named_parameters()), shape, seed=1)
    assert not any(table.weight[301:].any() for table in (model.wte, model.head) if table)
    assert abs(model(ids[:, :-1], ids[:, 1:]).item() / 64 - math.log(301)) < 0.1
