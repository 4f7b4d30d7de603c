"""What a family's row, list of weights and presets say, and what Llama's family refuses."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from gptscale.common.engines.tensor_parallel import check_tp
from gptscale.common.errors import ConfigError
from gptscale.common.model.gpt import activation_function
from gptscale.common.settings.families import FAMILIES, MODELS, model_class, preset
from gptscale.common.settings.run_config import RunConfig

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


def test_the_contractual_shape():
    gpt = preset("1.6b")
    assert (gpt.n_embd, gpt.n_head, gpt.n_layer, gpt.block_size, gpt.vocab_size) == (1600, 32, 48, 1024, 50257)
    assert (gpt.n_params, gpt.n_matmul_params, gpt.head_dim) == (1_557_611_200, 1_554_971_200, 50)
    assert gpt.padded_vocab_size == 50304
    assert gpt.lr == 5e-4


@pytest.mark.usefixtures("operators_of_the_user")
@pytest.mark.parametrize("variant", ["tanh", "erf", "sigmoid"])
def test_an_operator_of_ours_is_torchs_gelu_of_that_name(variant):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(activation_function(f"custom-{variant}")(x), activation_function(f"gelu_{variant}")(x))


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.presets])
def test_a_familys_row_names_its_presets(name):
    module = import_module(f"gptscale.common.settings.{FAMILIES[name].config}")
    assert FAMILIES[name].presets.split() == list(module.PRESETS)


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
