from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from gptscale.common.model import loss as loss_module
from gptscale.common.model.loss import IGNORE, by_onednn, linear_cross_entropy, product


@pytest.fixture
def problem(monkeypatch):
    """100 rows in blocks of 34 (the last one shorter), slices of 10, 120 ids in a table of 128, each seventh target ignored."""
    monkeypatch.setitem(loss_module.LOGITS_BYTES, "cpu", 4 * 128 * 40)
    monkeypatch.setattr(loss_module, "SLICE_BYTES", 4 * 128 * 10)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 16, generator=generator, dtype=torch.float64)
    weight = torch.randn(128, 16, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 120, (100,), generator=generator)
    targets[::7] = IGNORE
    # The padding rows would win by far.
    weight[120:] = 100.0 * x[0]
    return x, weight, targets


def reference(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight)[:, :120], targets, ignore_index=IGNORE, reduction="sum")


def value_and_grads(function, *tensors, **options):
    leaves = [t.detach().clone().requires_grad_() for t in tensors[:2]]
    loss = function(*leaves, *tensors[2:], **options)
    (3.0 * loss).backward()
    return loss.detach(), *(leaf.grad for leaf in leaves)


def test_equals_torch_cross_entropy(problem):
    """Ignored rows, and the rows of the table that are padding, get no gradient at all."""
    x, weight, targets = problem
    ours = value_and_grads(linear_cross_entropy, x.float(), weight.float(), targets, vocab_size=120)
    for a, b in zip(ours, value_and_grads(reference, x, weight, targets), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert not ours[1][::7].any()
    assert not ours[2][120:].any()


def test_without_gradients_a_batch_of_which_nothing_counts_has_loss_0(problem):
    x, weight, targets = problem
    with torch.no_grad():
        nothing = linear_cross_entropy(x.float(), weight.float(), torch.full_like(targets, IGNORE), 120)
    assert nothing == 0
    assert not nothing.requires_grad


def test_huge_logits_give_finite_loss(problem):
    x, weight, targets = problem
    loss = linear_cross_entropy(1e3 * x.float(), 1e3 * weight.float(), targets, 120)
    torch.testing.assert_close(loss.double(), reference(1e3 * x, 1e3 * weight, targets), rtol=1e-5, atol=0)


def test_bf16_autocast_runs_products_in_bf16_and_keeps_fp32_gradients(problem):
    x, weight, targets = problem
    with torch.autocast("cpu", torch.bfloat16):
        ours = value_and_grads(linear_cross_entropy, x.float(), weight.float(), targets, vocab_size=120)
    theirs = value_and_grads(reference, x, weight, targets)
    assert [t.dtype for t in ours] == [torch.float32] * 3
    # Numbers of bf16 have 8 bits, so an error is a few times 2**-8 of the largest entry.
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b).abs().max() < 0.03 * b.abs().max()


def test_never_holds_the_logits_of_the_batch(problem, monkeypatch):
    """The largest block of logits seen must obey the limit, whatever the number of rows."""
    x, weight, targets = problem
    spy = Mock(wraps=loss_module.softmax_and_loss)
    monkeypatch.setattr(loss_module, "softmax_and_loss", spy)
    linear_cross_entropy(x.float(), weight.float(), targets, 120)
    assert [tuple(call.args[0].shape) for call in spy.call_args_list] == [(34, 128)] * 2 + [(32, 128)]


def test_blocks_are_counted_by_what_is_alive_of_a_logit(monkeypatch):
    """On CUDA the kernel takes logits as they are: 16 bits make blocks twice as long. A table that is cut makes copies."""
    monkeypatch.setattr(loss_module, "TRITON", True)
    ours, cut = loss_module.softmax_and_loss, lambda *_: None
    count = loss_module.bytes_of_a_logit
    assert [count(dtype, ours, "cuda") for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [2, 2, 4]
    assert [count(dtype, cut, "cuda") for dtype in (torch.bfloat16, torch.float32)] == [6, 4]
    assert [count(dtype, ours, "cpu") for dtype in (torch.bfloat16, torch.float32)] == [4, 4]
    monkeypatch.setattr(loss_module, "TRITON", False)
    assert count(torch.bfloat16, ours, "cuda") == 6


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (7, 33, 5), (64, 48, 301), (130, 16, 384)])
def test_equals_the_product_in_float64(m, k, n, transposed):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator).t() if transposed else torch.randn(k, n, generator=generator)
    assert by_onednn(a, b)
    found = product(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=0, atol=1e-5 * k**0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_nothing_go_the_usual_way(dtype):
    a, b = torch.ones(3, 4, dtype=dtype), torch.ones(4, 2, dtype=dtype)
    assert not by_onednn(a, b)
    assert torch.equal(product(a, b), a @ b)
    assert product(torch.ones(0, 4), torch.ones(4, 2)).shape == (0, 2)
