import pytest
import torch

from gptscale.common.model.matrix_products import by_onednn, product

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
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


def test_without_onednn_the_usual_way(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    a, b = torch.ones(3, 4), torch.ones(4, 2)
    assert torch.equal(product(a, b), a @ b)
