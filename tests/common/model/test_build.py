"""Building the GPT of a run: a shape without memory, then the weights that this process holds."""

from contextlib import nullcontext

import pytest
import torch

from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import GPT
from gptscale.common.model.initial_weights import init_tensor

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
