import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptscale.common.model.gpt import activation_function
from gptscale.common.settings.gpt_config import ACTIVATIONS, PRESETS, GPTConfig

SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=301)


def test_the_contractual_shape():
    gpt = PRESETS["1.6b"]
    assert (gpt.n_embd, gpt.n_head, gpt.n_layer, gpt.block_size, gpt.vocab_size) == (1600, 32, 48, 1024, 50257)
    assert (gpt.n_params, gpt.n_matmul_params, gpt.head_dim) == (1_557_611_200, 1_554_971_200, 50)
    assert gpt.padded_vocab_size == 50304
    assert gpt.lr == 5e-4


def test_matmul_parameters_against_torch_flop_counter(ids, random_model):
    """Forward has 2 operations per matmul parameter and token. The counter sees attention too, whose formula is taken away."""
    model = random_model(GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=384))
    counter = FlopCounterMode(display=False)
    # The kernel is MATH, because the fused CPU kernel is not in the counter's table.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(ids[:, :32])
    # 2 products x 2 operations x L h T per token, over the full square, for 64 tokens.
    attention = 4 * 3 * 64 * 32 * 32 * 2
    assert counter.get_total_flops() - attention == 2 * model.config.n_matmul_params * 64


def test_loss_is_cross_entropy_of_the_logits(ids, random_model):
    model = random_model()
    inputs, targets = ids[:, :-1], ids[:, 1:]
    logits = model(inputs)
    assert logits.shape == (2, 32, 301)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(inputs, targets), expected, rtol=1e-5, atol=1e-4)


def test_attention_is_causal(ids, random_model):
    model = random_model().eval()
    other = ids[:, :-1].clone()
    other[:, 20:] = 7
    torch.testing.assert_close(model(ids[:, :-1])[:, :20], model(other)[:, :20])


@pytest.mark.usefixtures("operators_of_the_user")
@pytest.mark.parametrize("variant", ["tanh", "erf", "sigmoid"])
def test_our_operators_in_the_gpt_compute_what_torchs_do(ids, variant, random_model):
    found = []
    for activation in (f"gelu_{variant}", f"custom-{variant}"):
        model = random_model(dataclasses.replace(SMALL, activation=activation))
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        found.append((loss.item(), norm.item()))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


X = torch.linspace(-6, 6, 101, dtype=torch.float64)
EXACT = {
    "erf": X * 0.5 * (1 + torch.erf(X / 2**0.5)),
    "tanh": X * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (X + 0.044715 * X**3))),
    "sigmoid": X * torch.sigmoid(1.702 * X),
}


@pytest.mark.usefixtures("operators_of_the_user")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_name_means_its_formula(name):
    torch.testing.assert_close(activation_function(name)(X), EXACT[name.replace("_", "-").partition("-")[2]])


def test_another_name_is_none():
    with pytest.raises(KeyError):
        activation_function("gelu_cubic")
