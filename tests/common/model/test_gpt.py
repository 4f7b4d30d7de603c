import pytest
import torch

from gptscale.common.model.gpt import activation_function
from gptscale.common.settings.gpt_config import ACTIVATIONS, PRESETS


def test_the_contractual_shape():
    gpt = PRESETS["1.6b"]
    assert (gpt.n_embd, gpt.n_head, gpt.n_layer, gpt.block_size, gpt.vocab_size) == (1600, 32, 48, 1024, 50257)
    assert (gpt.n_params, gpt.n_matmul_params, gpt.head_dim) == (1_557_611_200, 1_554_971_200, 50)
    assert gpt.padded_vocab_size == 50304
    assert gpt.lr == 5e-4


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
