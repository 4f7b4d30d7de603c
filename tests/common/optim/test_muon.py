"""Muon: what its iterations make of a matrix, torch's own Muon, which matrices there are, and what is left alone."""

import pytest
import torch
from torch import nn

from gptscale.common.model.gpt import GPT
from gptscale.common.model.hf_gpt2 import qkv_to_hf
from gptscale.common.optim import muon
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import RunConfig

CONFIG = RunConfig(optimizer="muon", n_layer=1, n_head=2, n_embd=8, vocab_size=20, seq_len=16, weight_decay=0.1)
QKV, MLP = "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc.weight"


def gpt_and_stepper(config=CONFIG):
    torch.manual_seed(0)
    model = GPT(config.gpt())
    return model, FusedOptimizer(dict(model.named_parameters()), config)


def give_gradients(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_singular_values_become_nearly_1_and_directions_stay(shape):
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ muon.orthogonalised(x) @ v.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert torch.allclose(inner, torch.diag_embed(values), atol=1e-4)
    assert values[s > 0.05 * s.amax()].min() > 0.6
    assert values.max() < 1.3
    assert not muon.orthogonalised(torch.zeros(1, *shape)).any()


def test_steps_equal_those_of_torch(monkeypatch):
    """Torch's Muon has the same coefficients, Nesterov's form and the scale of Liu et al., and computes in bf16."""
    torch_muon = getattr(torch.optim, "Muon", None) or pytest.skip("before 2.9 torch has no Muon")
    monkeypatch.setitem(muon.DTYPES, "cpu", torch.bfloat16)
    model, stepper = gpt_and_stepper()
    theirs = nn.Parameter(model.get_parameter(MLP).detach().clone())
    reference = torch_muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        give_gradients(model, step)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        theirs.grad = model.get_parameter(MLP).grad / max(1.0, float(norm))
        reference.step()
        stepper.step(0.01, torch.tensor(1.0))
    torch.testing.assert_close(model.get_parameter(MLP), theirs, rtol=1e-3, atol=1e-4)


def test_query_key_and_value_are_a_matrix_each():
    model, _ = gpt_and_stepper()
    momentum = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    update = muon.direction(momentum, model.config.weight(QKV).rows)
    parts = qkv_to_hf(momentum, 2).view(3, 8, 8)
    expected = torch.cat([muon.direction(part, ()) for part in parts])
    torch.testing.assert_close(qkv_to_hf(update, 2), expected)


def test_matrices_have_a_momentum_and_all_else_the_moments_of_adamw():
    model, stepper = gpt_and_stepper()
    expected = set()
    for name, p in model.named_parameters():
        is_matrix = name.startswith("blocks.") and p.dim() > 1
        moments = ["muon.momentum"] if is_matrix else ["muon.exp_avg", "muon.exp_avg_sq"]
        expected |= {f"{kind}/{name}" for kind in ("model", *moments)}
    assert {box.name for box in stepper.state()} == expected
    n, run = model.config.n_params_in_memory, Run("single", CONFIG, model.config, None, None)
    # A block of width 8 has 12 x 8 x 8 elements in matrices.
    assert run.optimizer_bytes(n, "fp32") == 8 * n - 4 * 12 * 64 == stepper.nbytes() - 4 * n


def test_a_step_that_is_not_finite_changes_no_bit_of_weights_and_state():
    model, stepper = gpt_and_stepper()
    give_gradients(model)
    stepper.step(0.1, torch.tensor(1.0))
    before = {box.name: box.tensor.clone() for box in stepper.state()}
    give_gradients(model)
    model.get_parameter(MLP).grad[0, 0] = torch.nan
    stepper.step(0.1, torch.tensor(1.0))
    assert all(torch.equal(before[box.name], box.tensor) for box in stepper.state())
    assert stepper.counters()["optimizer_steps"] == 1
