"""The Stepper of libraries that bring an optimizer of their own, held against torch's functions and our own Stepper."""

import dataclasses

import pytest
import torch
from torch import nn

from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.optim.library import LibraryOptimizer, make_torch_optimizer, torch_optimizer
from gptscale.common.settings.run_config import RunConfig


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def stepper_of(model, config):
    """A Stepper over the optimizer of torch, as a library that changes nothing would give it."""
    optimizer = make_torch_optimizer(model, config)
    parameters = dict(model.named_parameters())

    def clip(max_norm):
        return nn.utils.clip_grad_norm_(parameters.values(), max_norm)

    return LibraryOptimizer(optimizer, optimizer, parameters, config, clip=clip, zero_grad=optimizer.zero_grad)


def give_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def test_matrices_decay_and_vectors_do_not():
    config = RunConfig(optimizer="adamw", weight_decay=0.3, lr=0.02, beta1=0.8, beta2=0.9)
    optimizer = make_torch_optimizer(small_model(), config)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups} == {0.3: 1, 0.0: 3}
    assert all((group["lr"], group["betas"]) == (0.02, (0.8, 0.9)) for group in optimizer.param_groups)


def test_sgd_has_no_momentum_and_no_moments():
    config = RunConfig(optimizer="sgd", lr=0.5)
    assert torch_optimizer(config) == (torch.optim.SGD, {"lr": 0.5})
    stepper = stepper_of(small_model(), config)
    assert {shard.name.split("/")[0] for shard in stepper.state()} == {"model"}
    assert stepper.counters()["optimizer_steps"] == 0.0


@pytest.mark.parametrize("clip_grad_norm", [0.5, 0.0])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_it_computes_what_the_stepper_of_torchs_recipes_computes(name, clip_grad_norm):
    config = RunConfig(optimizer=name, clip_grad_norm=clip_grad_norm)
    models = small_model(), small_model()
    steppers = stepper_of(models[0], config), FusedOptimizer(dict(models[1].named_parameters()), config)
    for step in range(3):
        norms = []
        for model, stepper in zip(models, steppers, strict=True):
            give_gradients(model, step)
            norms.append(stepper.step(0.1 / (step + 1), torch.tensor(1.0)))
            assert all(p.grad is None for p in model.parameters())
        torch.testing.assert_close(*norms)
    for library_box, own_box in zip(*(stepper.state() for stepper in steppers), strict=True):
        assert library_box.name == own_box.name
        torch.testing.assert_close(library_box.tensor, own_box.tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_after_a_number_that_is_not_finite_no_step_changes_a_weight(loss, gradient):
    model = small_model()
    stepper = stepper_of(model, RunConfig())
    before = [p.detach().clone() for p in model.parameters()]
    give_gradients(model, 0)
    model[0].bias.grad[1] = gradient
    stepper.step(0.1, torch.tensor(loss))
    give_gradients(model, 1)
    stepper.step(0.1, torch.tensor(1.0))
    assert all(map(torch.equal, before, model.parameters()))
    assert stepper.counters()["optimizer_steps"] == 0.0


def test_a_step_that_is_left_out_changes_no_weight_and_the_next_does():
    model = small_model()
    stepper = stepper_of(model, RunConfig())
    stepper.skips = lambda loss, norm: float(loss) > 5
    before = model[0].weight.detach().clone()
    give_gradients(model, 0)
    stepper.step(0.1, torch.tensor(9.0))
    assert torch.equal(model[0].weight, before)
    assert all(p.grad is None for p in model.parameters())
    give_gradients(model, 1)
    stepper.step(0.1, torch.tensor(1.0))
    assert not torch.equal(model[0].weight, before)
    assert stepper.counters()["optimizer_steps"] == 1.0


def test_state_and_counters_continue_another_stepper():
    config = dataclasses.replace(RunConfig(), weight_decay=0.0)
    models = small_model(), small_model()
    first, second = (stepper_of(model, config) for model in models)
    for step in range(2):
        give_gradients(models[0], step)
        first.step(0.1, torch.tensor(1.0))
    for source, target in zip(first.state(), second.state(), strict=True):
        target.tensor.copy_(source.tensor)
    second.load_counters(first.counters())
    assert second.counters() == {"optimizer_steps": 2.0, "loss_scale": 1.0, "loss_scale_good_steps": 0.0}
    for model, stepper in zip(models, (first, second), strict=True):
        give_gradients(model, 2)
        stepper.step(0.1, torch.tensor(1.0))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_only_the_owner_of_a_parameter_has_its_moments():
    """As fairscale's OSS: every rank has all weights, its inner optimizer only some of them."""
    model = small_model()
    parameters = dict(model.named_parameters())
    inner = torch.optim.AdamW([parameters["1.bias"]], fused=True)
    stepper = LibraryOptimizer(
        inner, inner, parameters, RunConfig(), clip=lambda max_norm: torch.ones(()), zero_grad=inner.zero_grad
    )
    assert [shard.name for shard in stepper.state()] == [
        *(f"model/{name}" for name in parameters),
        "adamw.exp_avg/1.bias",
        "adamw.exp_avg_sq/1.bias",
    ]
