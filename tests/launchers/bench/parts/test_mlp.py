"""The MLP of `gptscale bench parts`: its shapes, its operations, and that its ways compute one function."""

import pytest
import torch
import torch.nn.functional as F

from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.launchers.bench.parts.mlp import mlp
from gptscale.launchers.bench.parts.ways import StepShape

CPU = torch.device("cpu")


@pytest.fixture
def part():
    torch.manual_seed(0)
    gpt = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=30)
    return mlp(StepShape(gpt, 3, torch.float32, CPU, compiled=False))


def test_its_operations_are_those_of_two_products_forward_and_four_backward(part):
    # 12 rows; two matrices of 8 x 32; two operations for each number, three times.
    assert part.flops == 3 * 2 * 12 * 2 * 8 * 32
    assert [way.name for way in part.ways] == ["torch", "custom"]


def test_a_way_returns_the_output_and_the_gradients_of_input_and_weights(part):
    results = [way.run() for way in part.ways]
    assert [tuple(t.shape) for t in results[0]] == [(12, 8), (12, 8), (32, 8), (32,), (8, 32), (8,)]
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_forward_alone_is_the_first_of_them(part):
    way = part.ways[0]
    _, x, fc_weight, fc_bias, proj_weight, proj_bias = way.forward.__wrapped__.args
    expected = F.gelu(x @ fc_weight.T + fc_bias, approximate="tanh") @ proj_weight.T + proj_bias
    output = way.forward()
    assert not output.requires_grad
    torch.testing.assert_close(output, expected.detach())
    torch.testing.assert_close(way.run()[0], output)
