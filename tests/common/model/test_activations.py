"""Activations by name: all that a model may have, each the function that its name says."""

import pytest
import torch

from gptscale.common.model.activations import activation_function
from gptscale.common.settings.gpt_config import ACTIVATIONS

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
