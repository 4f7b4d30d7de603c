"""Batch norm over all ranks: two ranks with the same half of a batch compute what one computes with the whole."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gptscale.lenet.models.batch_norm import SyncedBatchNorm2d, synced


@pytest.fixture
def two_alike(monkeypatch):
    """A world of two ranks that hold the same numbers, whose sums are therefore twice those of one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))


def layers():
    """One layer of torch and one of ours, with the same weights that are not those of the start."""
    plain = nn.BatchNorm2d(3, eps=1e-3, momentum=0.3)
    with torch.no_grad():
        plain.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        plain.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    ours = synced(nn.Sequential(plain))[0]
    return plain, ours


def test_a_model_keeps_its_weights_statistics_and_options():
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Sequential(nn.BatchNorm2d(3, eps=0.5, momentum=0.25)))
    model(torch.randn(4, 1, 2, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    replaced = synced(model)
    assert replaced is model
    assert type(model[1][0]) is SyncedBatchNorm2d
    assert (model[1][0].eps, model[1][0].momentum) == (0.5, 0.25)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # A layer that was replaced stays as it is.
    assert synced(model)[1][0] is model[1][0]


@pytest.mark.usefixtures("two_alike")
def test_values_gradients_and_statistics_are_those_of_the_whole_batch():
    torch.manual_seed(0)
    plain, ours = layers()
    half = torch.randn(4, 3, 5, 5, dtype=torch.float64).float() * 3 + 100
    whole = torch.cat([half, half]).requires_grad_()
    half = half.clone().requires_grad_()
    weights = torch.randn(4, 3, 5, 5)
    expected = plain(whole)
    (expected * torch.cat([weights, weights])).sum().backward()
    result = ours(half)
    (result * weights).sum().backward()
    torch.testing.assert_close(result, expected[:4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(half.grad, whole.grad[:4], rtol=1e-3, atol=1e-4)
    # DDP sums the gradients of weights over the ranks, here of two that are alike.
    torch.testing.assert_close(2 * ours.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(2 * ours.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    torch.testing.assert_close(ours.running_var, plain.running_var, rtol=1e-4, atol=1e-4)
    assert ours.num_batches_tracked == 1


@pytest.mark.usefixtures("two_alike")
def test_16_bits_are_summed_in_32():
    _, ours = layers()
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    result = ours(x)
    assert result.dtype == torch.bfloat16
    assert ours.running_mean.dtype == torch.float32
    mean = torch.cat([x, x]).float().mean((0, 2, 3))
    torch.testing.assert_close(ours.running_mean, 0.3 * mean)


@pytest.mark.usefixtures("two_alike")
def test_an_evaluation_exchanges_nothing(monkeypatch):
    plain, ours = layers()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: pytest.fail("an exchange"))
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(ours.eval()(x), plain.eval()(x))
