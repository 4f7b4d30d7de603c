"""Our Stepper and that of libraries with an optimizer of their own: torch's numbers, NaN, skipped steps, counters."""

import pytest
import torch
from torch import nn

from gptscale.common.model.precision import LossScale
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.optim.library import LibraryOptimizer, make_torch_optimizer
from gptscale.common.settings.run_config import RunConfig


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def fused(model, config):
    return FusedOptimizer(dict(model.named_parameters()), config)


def library(model, config):
    """A Stepper over the optimizer of torch, as a library that changes nothing would give it."""
    optimizer = make_torch_optimizer(model, config)
    parameters = dict(model.named_parameters())

    def clip(max_norm):
        return nn.utils.clip_grad_norm_(parameters.values(), max_norm)

    return LibraryOptimizer(optimizer, optimizer, parameters, config, clip=clip)


EVERY = pytest.mark.parametrize(("stepper_of", "name"), [(fused, "adamw"), (fused, "sgd"), (library, "adamw")])


def give_gradients(model, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator)


def copies(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [0.5, 1e6, 0.0])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("stepper_of", [fused, library])
def test_equals_torch_step_with_clip_grad_norm(stepper_of, name, clip):
    config = RunConfig(optimizer=name, clip_grad_norm=clip, weight_decay=0.1, beta1=0.8, beta2=0.9)
    ours, theirs = small_model(), small_model()
    optimizer = stepper_of(ours, config)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    kind, options = (torch.optim.AdamW, {"betas": (0.8, 0.9)}) if name == "adamw" else (torch.optim.SGD, {})
    reference = kind(groups, lr=1.0, **options)
    for step in range(4):
        lr = 0.01 * (step + 1)
        give_gradients(ours, step)
        give_gradients(theirs, step)
        norm = optimizer.step(lr, torch.tensor(1.0))
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), clip or 1e9)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        torch.testing.assert_close(norm, expected)
        assert all(p.grad is None for p in ours.parameters())
    moments = ("exp_avg", "exp_avg_sq") if name == "adamw" else ()
    boxes = {box.name: box.tensor for box in optimizer.state()}
    assert {box.partition("/")[0] for box in boxes} == {"model", *(f"adamw.{moment}" for moment in moments)}
    for (key, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        for moment in moments:
            torch.testing.assert_close(boxes[f"adamw.{moment}/{key}"], reference.state[b][moment], rtol=1e-5, atol=1e-7)
    # Torch's SGD does not count its steps.
    assert optimizer.counters()["optimizer_steps"] == (4 if name == "adamw" else 0)


@pytest.mark.promise("N2")
@EVERY
@pytest.mark.parametrize(
    ("bad_gradient", "loss"), [(float("nan"), 1.0), (float("inf"), 1.0), (0.5, float("nan")), (0.5, float("inf"))]
)
def test_after_nan_or_inf_no_step_ever_changes_a_weight(stepper_of, name, bad_gradient, loss):
    model = small_model()
    before, stepper = copies(model), stepper_of(model, RunConfig(optimizer=name))
    give_gradients(model)
    model[0].bias.grad[1] = bad_gradient
    stepper.step(0.1, torch.tensor(loss))
    give_gradients(model)
    stepper.step(0.1, torch.tensor(1.0))
    assert all(map(torch.equal, before, model.parameters()))
    assert stepper.counters()["optimizer_steps"] == 0


@EVERY
def test_a_skipped_step_changes_nothing_and_the_next_is_applied(stepper_of, name):
    model, other = small_model(), small_model()
    stepper, reference = (stepper_of(m, RunConfig(optimizer=name)) for m in (model, other))
    stepper.skips = lambda loss, norm: float(loss) > 5
    for loss, seed in ((1.0, 0), (9.0, 1), (1.0, 2)):
        give_gradients(model, seed)
        before = copies(model)
        stepper.step(0.1, torch.tensor(loss))
        assert all(p.grad is None for p in model.parameters())
        if loss < 5:
            give_gradients(other, seed)
            reference.step(0.1, torch.tensor(loss))
        assert all(map(torch.equal, model.parameters(), other.parameters()))
        assert (loss > 5) == all(map(torch.equal, before, model.parameters()))
    assert stepper.counters() == reference.counters()


@pytest.mark.parametrize(("stepper_of", "precision"), [(fused, "fp16"), (library, "fp32")])
def test_state_and_counters_continue_another_stepper(stepper_of, precision):
    config = RunConfig(weight_decay=0.0, precision=precision)
    models = small_model(), small_model()
    first, second = (stepper_of(model, config) for model in models)
    for step in range(2):
        give_gradients(models[0], step)
        first.step(0.1, torch.tensor(1.0))
    for source, target in zip(first.state(), second.state(), strict=True):
        target.tensor.copy_(source.tensor)
    second.load_counters(first.counters())
    scale, good = (65536.0, 2.0) if precision == "fp16" else (1.0, 0.0)
    assert second.counters() == {"optimizer_steps": 2.0, "loss_scale": scale, "loss_scale_good_steps": good}
    for model, stepper in zip(models, (first, second), strict=True):
        give_gradients(model, 2)
        stepper.step(0.1, torch.tensor(1.0))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.promise("N3 | an overflow in fp16 | the step is skipped and the scale halved")
def test_fp16_overflow_skips_the_step_halves_the_scale_and_goes_on():
    model = small_model()
    before, optimizer = copies(model), fused(model, RunConfig(precision="fp16"))
    give_gradients(model, scale=float("inf"))
    optimizer.step(0.1, torch.tensor(1.0))
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.loss_scale.value == 2.0**15
    give_gradients(model, scale=2.0**15)
    norm = optimizer.step(0.1, torch.tensor(1.0))
    give_gradients(model)
    torch.testing.assert_close(norm, torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    assert not any(map(torch.equal, before, model.parameters()))
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


def test_only_the_owner_of_a_parameter_has_its_moments():
    """As fairscale's OSS: every rank has all weights, its inner optimizer only some of them."""
    model = small_model()
    parameters = dict(model.named_parameters())
    inner = torch.optim.AdamW([parameters["1.bias"]], fused=True)
    stepper = LibraryOptimizer(inner, inner, parameters, RunConfig(), clip=lambda max_norm: torch.ones(()))
    assert [shard.name for shard in stepper.state()] == [
        *(f"model/{name}" for name in parameters),
        "adamw.exp_avg/1.bias",
        "adamw.exp_avg_sq/1.bias",
    ]
