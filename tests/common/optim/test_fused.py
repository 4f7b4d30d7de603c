import dataclasses

import pytest
import torch
from torch import nn

from gptscale.common.model.precision import LossScale
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.settings.run_config import RunConfig


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 3), "b.bias": (7,), "c.weight": (2, 2)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def give_gradients(params, scale=1.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in params.values():
        p.grad = scale * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("clip", [0.5, 1e6, 0.0])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_equals_torch_step_with_clip_grad_norm(name, clip):
    config = RunConfig(optimizer=name, clip_grad_norm=clip, weight_decay=0.1)
    ours, theirs = parameters(), parameters()
    optimizer = FusedOptimizer(ours, config)
    groups = [
        {"params": [theirs["a.weight"], theirs["c.weight"]], "weight_decay": 0.1},
        {"params": [theirs["b.bias"]], "weight_decay": 0.0},
    ]
    reference = (
        torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95)) if name == "adamw" else torch.optim.SGD(groups, lr=1.0)
    )
    for step in range(4):
        lr = 0.01 * (step + 1)
        give_gradients(ours, seed=step)
        give_gradients(theirs, seed=step)
        norm = optimizer.step(lr, torch.tensor(1.0))
        expected = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or 1e9)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        torch.testing.assert_close(norm, expected)
        assert all(p.grad is None for p in ours.values())
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("bad_gradient", "loss"), [(float("nan"), 1.0), (float("inf"), 1.0), (0.5, float("nan")), (0.5, float("inf"))]
)
def test_a_number_that_is_none_never_reaches_the_weights_nor_does_any_later_step(name, bad_gradient, loss):
    params = parameters()
    before = {n: p.detach().clone() for n, p in params.items()}
    optimizer = FusedOptimizer(params, RunConfig(optimizer=name))
    give_gradients(params)
    params["c.weight"].grad[0, 0] = bad_gradient
    optimizer.step(0.1, torch.tensor(loss))
    give_gradients(params)
    optimizer.step(0.1, torch.tensor(1.0))
    assert all(torch.equal(before[n], p) for n, p in params.items())
    assert optimizer.counters()["optimizer_steps"] == 0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_that_is_left_out_changes_nothing_and_the_next_is_applied(name):
    params, others = parameters(), parameters()
    optimizer, reference = (
        FusedOptimizer(params, RunConfig(optimizer=name)),
        FusedOptimizer(others, RunConfig(optimizer=name)),
    )
    optimizer.skips = lambda loss, norm: float(loss) > 5
    for loss, seed in ((1.0, 0), (9.0, 1), (1.0, 2)):
        give_gradients(params, seed=seed)
        optimizer.step(0.1, torch.tensor(loss))
        if loss < 5:
            give_gradients(others, seed=seed)
            reference.step(0.1, torch.tensor(loss))
        assert all(torch.equal(p, others[n]) for n, p in params.items())
    assert optimizer.counters() == reference.counters()


def test_fp16_overflow_skips_the_step_halves_the_scale_and_goes_on():
    config = dataclasses.replace(RunConfig(), precision="fp16")
    params = parameters()
    before = {n: p.detach().clone() for n, p in params.items()}
    optimizer = FusedOptimizer(params, config)
    give_gradients(params, scale=float("inf"))
    optimizer.step(0.1, torch.tensor(1.0))
    assert all(torch.equal(before[n], p) for n, p in params.items())
    assert optimizer.loss_scale.value == 2.0**15
    give_gradients(params, scale=2.0**15)
    norm = optimizer.step(0.1, torch.tensor(1.0))
    give_gradients(params, seed=1)
    expected = torch.stack([p.grad.norm() for p in params.values()]).norm()
    torch.testing.assert_close(norm, expected)
    assert not any(torch.equal(before[n], p) for n, p in params.items())
    assert optimizer.counters()["optimizer_steps"] == 1


def test_loss_scale_grows_after_good_steps_and_has_a_floor(monkeypatch):
    monkeypatch.setattr(LossScale, "GROWTH_INTERVAL", 3)
    scale = LossScale("fp16", torch.device("cpu"))
    for _ in range(3):
        scale.update(torch.tensor(False))
    assert (scale.value, scale.good_steps) == (2.0**17, 0.0)
    for _ in range(40):
        scale.update(torch.tensor(True))
    assert scale.value == LossScale.FLOOR


def test_counters_come_back():
    config = dataclasses.replace(RunConfig(), precision="fp16")
    first, second = FusedOptimizer(parameters(), config), FusedOptimizer(parameters(), config)
    give_gradients(first.parameters)
    first.step(0.1, torch.tensor(1.0))
    second.load_counters(first.counters())
    assert (
        second.counters()
        == first.counters()
        == {"optimizer_steps": 1.0, "loss_scale": 65536.0, "loss_scale_good_steps": 1.0}
    )
