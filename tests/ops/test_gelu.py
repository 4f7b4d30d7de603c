"""GELU and bias+GELU: every implementation against float64, beside PyTorch's own on the same numbers."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from operators import implementations, needs_cpp

from gptscale.ops import gelu as g

VARIANTS = g.APPROXIMATE
IMPLEMENTATIONS = implementations("python", "cpp")
NARROW = [torch.float32, torch.bfloat16, torch.float16]


def torchs_own(x, variant):
    """Compute GELU as a user of PyTorch would write it."""
    if variant == "sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="none" if variant == "erf" else variant)


def derivative(f, x):
    x = x.clone().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, torch.ones_like(y))[0]


def numbers(dtype):
    """Return numbers of every size: where activations are, where e^-z ends, denormal ones, and the largest of the type."""
    generator = torch.Generator().manual_seed(0)
    near = torch.cat([torch.linspace(-5.6, 5.6, 40_001), torch.randn(20_000, generator=generator)])
    far = torch.cat([torch.linspace(-15, 15, 20_001), torch.logspace(-45, 38, 3_000), -torch.logspace(-45, 38, 3_000)])
    x = torch.cat([near, far, torch.zeros(1), -torch.zeros(1)]).to(dtype)
    return x[torch.isfinite(x)]


def ulp(result, exact, dtype):
    """Return the largest error in units in the last place of the exact value, or NaN where only `result` is NaN."""
    limits = torch.finfo(dtype)
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(limits.tiny)))) * limits.eps
    there = torch.isfinite(exact) & (exact.abs() < limits.max)
    return float(((result.double() - exact).abs() / unit)[there].max())


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("variant", VARIANTS)
@needs_cpp
def test_error_is_no_larger_than_torchs_own(variant, dtype):
    x = numbers(dtype)
    exact, slope = g.python_gelu(x.double(), variant), g.python_gelu_backward(torch.ones(()), x.double(), variant)
    own_error, torch_error = ulp(g.gelu(x, variant), exact, dtype), ulp(torchs_own(x, variant), exact, dtype)
    own_slope_error = ulp(derivative(lambda v: g.gelu(v, variant, "cpp"), x), slope, dtype)
    torch_slopes = derivative(lambda v: torchs_own(v, variant), x)
    # PyTorch's derivative is NaN at some x where ours is not.
    finite = torch.isfinite(torch_slopes)
    torch_slope_error = ulp(torch_slopes[finite], slope[finite], dtype)
    assert own_error <= torch_error
    assert own_slope_error <= torch_slope_error
    assert own_error <= (64 if dtype is torch.float32 else 0.51)
    near = x.abs() < 5.6
    assert ulp(g.gelu(x, variant)[near], exact[near], dtype) <= (7 if dtype is torch.float32 else 0.51)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_against_forty_digits(variant, implementation):
    mpmath = pytest.importorskip("mpmath")
    x = torch.cat([torch.linspace(-12, 12, 97), torch.tensor([1e-300, -1e-300, 30.0, -30.0, 0.0])]).double()
    with mpmath.workdps(40):
        exact = []
        for v in map(mpmath.mpf, x.tolist()):
            z = 2 * mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)
            p = mpmath.erfc(-v / mpmath.sqrt(2)) / 2 if variant == "erf" else None
            p = p if p is not None else 1 / (1 + mpmath.exp(-(z if variant == "tanh" else mpmath.mpf("1.702") * v)))
            exact.append(float(v * p))
    result, exact = g.gelu(x, variant, implementation), torch.tensor(exact, dtype=torch.float64)
    # The term with x * x allows for the rounding of z, times z.
    assert ((result - exact).abs() <= 4e-16 * exact.abs() * (1 + x * x)).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_infinite_nan_and_signed_zero_as_in_torch(variant, implementation):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    for dtype in [*NARROW, torch.float64]:
        y = g.gelu(x.to(dtype), variant, implementation)
        assert y.isnan().tolist() == [True, False, True, False, False]
        assert y[1] == float("inf")
        assert torch.signbit(y[3:]).tolist() == [False, True]
        slopes = derivative(lambda v: g.gelu(v, variant, implementation), x.to(dtype))
        assert slopes[3:].tolist() == pytest.approx([0.5, 0.5], rel=1e-6)
        assert slopes[0].isnan()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_first_and_second_derivatives(variant, implementation):
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64).mul(2).requires_grad_()
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for f, arguments in (
        (lambda v: g.gelu(v, variant, implementation), (x,)),
        (lambda v, b: g.bias_gelu(v, b, variant, implementation), (x, bias)),
    ):
        assert torch.autograd.gradcheck(f, arguments)
        assert torch.autograd.gradgradcheck(f, arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bias_gelu_is_gelu_of_the_sum_and_sums_its_gradient(implementation):
    torch.manual_seed(0)
    for variant in VARIANTS:
        for dtype in NARROW:
            for shape in ((3, 50, 70), (1, 1), (257, 64), (2, 1000), (5,)):
                x, bias = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
                grad = torch.randn(shape).to(dtype)
                leaves = [t.clone().requires_grad_() for t in (x, bias)]
                y = g.bias_gelu(*leaves, variant, implementation)
                to_x, to_bias = torch.autograd.grad(y, leaves, grad)
                wide = x.double() + bias.double()
                eps = torch.finfo(dtype).eps
                torch.testing.assert_close(y.double(), g.python_gelu(wide, variant), rtol=4 * eps, atol=4 * eps)
                exact = g.python_gelu_backward(grad.double(), wide, variant)
                # The reference in Python takes exp(-x^2/2) of a rounded x^2.
                loose = 64 if dtype is torch.float32 else 4
                torch.testing.assert_close(to_x.double(), exact, rtol=loose * eps, atol=8 * eps)
                summed = exact.reshape(-1, shape[-1]).sum(0)
                size = float(exact.abs().reshape(-1, shape[-1]).sum(0).max())
                torch.testing.assert_close(to_bias.double(), summed, rtol=8 * eps, atol=4 * eps * (1 + size))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layouts_and_empty(implementation):
    x = torch.randn(2, 3, 8, 10)
    expected = g.python_gelu(x, "erf")
    for view in (
        x.to(memory_format=torch.channels_last),
        x.transpose(1, 3).contiguous().transpose(1, 3),
        torch.randn(2, 3, 8, 20)[..., ::2].copy_(x),
    ):
        y = g.gelu(view, "erf", implementation)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        assert y.stride() == torch.empty_like(view).stride()
        slopes = derivative(lambda v: g.gelu(v, "erf", implementation), view)
        torch.testing.assert_close(slopes, g.python_gelu_backward(torch.ones(()), x, "erf"), rtol=1e-5, atol=1e-6)
    assert g.gelu(torch.empty(0, 4), "tanh", implementation).shape == (0, 4)
    assert g.bias_gelu(torch.empty(0, 4), torch.ones(4), "tanh", implementation).shape == (0, 4)
    assert g.bias_gelu(torch.empty(4, 0), torch.ones(0), "tanh", implementation).shape == (4, 0)
    assert g.gelu(torch.tensor(1.0), "erf", implementation).item() == pytest.approx(0.8413447)


def test_autocast_brings_the_bias_to_the_dtype_of_x():
    linear, bias = torch.nn.Linear(16, 16, bias=False), torch.nn.Parameter(torch.randn(16))
    with torch.autocast("cpu", torch.bfloat16):
        y = g.bias_gelu(linear(torch.randn(4, 16)), bias, "tanh")
        assert g.gelu(linear(torch.randn(4, 16)), "tanh").dtype is torch.bfloat16
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert bias.grad.dtype is torch.float32


def test_the_check_of_the_page_runs_as_it_stands(capsys):
    """The exercise's check of loss and gradient, each formula against a reference of its own."""
    page = (Path(__file__).parents[2] / "docs" / "ops" / "gelu_in_lenet.md").read_text()
    (block,) = re.findall(r"(?m)^    import torch\n(?:(?:    .*)?\n)+", page)
    exec(textwrap.dedent(block), {})
    assert len(capsys.readouterr().out.splitlines()) == len(VARIANTS) * 2
