"""Convolution + bias + ReLU: every implementation against PyTorch's own pair and a float64 reference, on each feature."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from operators import DTYPES, implementations, needs_cpp

from gptscale.ops import conv as c
from gptscale.ops import registry

IMPLEMENTATIONS = implementations("python", "cpp")

# x, weight and (stride, padding, dilation, groups). They cover few channels, wide and narrow rows, 7x7 with stride 2, depthwise,
# grouped and dilated convolutions, and 1x1.
SHAPES = [
    ((3, 1, 28, 28), (6, 1, 5, 5), (1, 2, 1, 1)),
    ((2, 3, 32, 35), (13, 3, 3, 3), (1, 1, 1, 1)),
    ((2, 2, 40, 50), (8, 2, 3, 5), ((2, 3), (0, 4), (2, 1), 1)),
    ((2, 3, 40, 40), (8, 3, 7, 7), (2, 3, 1, 1)),
    ((8, 4, 9, 70), (5, 4, 2, 4), ((1, 2), 1, (1, 3), 1)),
    ((2, 6, 14, 14), (16, 6, 5, 5), (1, 0, 1, 1)),
    ((2, 8, 9, 11), (8, 1, 3, 3), (1, 1, 1, 8)),
    ((2, 6, 12, 10), (4, 3, 3, 2), ((2, 1), (1, 0), (1, 2), 2)),
    ((2, 16, 7, 7), (24, 16, 1, 1), (1, 0, 1, 1)),
    ((1, 3, 5, 6), (2, 3, 3, 3), (1, 1, 1, 1)),
]


def tensors(x_shape, w_shape, dtype, last=False, scale=1.0):
    torch.manual_seed(0)
    x, weight = torch.randn(x_shape).mul_(scale).to(dtype), torch.randn(w_shape).mul_(0.3).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    return x, weight, torch.randn(w_shape[0]).mul_(scale).to(dtype)


def eager(x, weight, bias, geometry):
    return F.relu(F.conv2d(x, weight, bias, *geometry))


def ulp(result, exact, dtype):
    """Return the largest error in units in the last place of the largest exact value in its channel, because sums cancel."""
    result, exact = result.detach(), exact.detach()
    axes = (0, 2, 3) if exact.dim() == 4 else 0
    size = exact.abs().amax(axes, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    unit = torch.exp2(torch.floor(torch.log2(size))) * torch.finfo(dtype).eps
    return float(((result.double() - exact).abs() / unit).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_against_float64_and_torchs_own(implementation, dtype):
    """On the same numbers the error is no larger than that of PyTorch's two operations."""
    tiny = 1e-30 if dtype in (torch.float32, torch.float64) else 1e-2 if dtype is torch.float16 else 1e-20
    for (x_shape, w_shape, geometry), last in itertools.product(SHAPES, (False, True)):
        for scale in (1.0, tiny, 100.0):
            x, weight, bias = tensors(x_shape, w_shape, dtype, last, scale)
            exact_in, own_in, torch_in = (
                [t.detach().to(d).requires_grad_() for t in (x, weight, bias)] for d in (torch.float64, dtype, dtype)
            )
            exact = eager(*exact_in, geometry)
            grad = torch.randn_like(exact).to(dtype)
            y = c.conv_bias_relu(*own_in, *geometry, implementation=implementation)
            torch_y = eager(*torch_in, geometry)
            assert ulp(y, exact, dtype) <= max(ulp(torch_y, exact, dtype), 1.0), (x_shape, last, scale)
            assert y.dtype == dtype
            # All three get the same mask, so that gradients are compared and not decisions at zero.
            mask = (y > 0) & (torch_y > 0) & (exact > 0)
            grad = torch.where(mask, grad, 0)
            triples = zip(
                torch.autograd.grad(y, own_in, grad),
                torch.autograd.grad(torch_y, torch_in, grad),
                torch.autograd.grad(exact, exact_in, grad.double()),
                strict=True,
            )
            for own_grad, torch_grad, exact_grad in triples:
                torch_ulp = ulp(torch_grad, exact_grad, dtype)
                assert ulp(own_grad, exact_grad, dtype) <= max(torch_ulp, 3.0), (x_shape, last, scale)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_infinities_and_zero(implementation):
    for dtype, (x_shape, w_shape, geometry) in itertools.product(DTYPES, (SHAPES[1], SHAPES[5])):
        x, weight, bias = tensors(x_shape, w_shape, dtype)
        x[0, 0, 3, 3], x[1, 1, 8, 8], x[1, 0, 2, 9] = float("nan"), float("inf"), -float("inf")
        x.requires_grad_()
        y, expected = c.conv_bias_relu(x, weight, bias, *geometry, implementation=implementation), eager(
            x, weight, bias, geometry
        )  # fmt: skip
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf(), expected.isinf())
        assert y.isnan().any()
        assert y.isinf().any()
        back, other = (torch.autograd.grad(v, (x,), torch.ones_like(v))[0] for v in (y, expected))
        assert torch.equal(back.isnan(), other.isnan())
    zero = c.conv_bias_relu(
        torch.zeros(1, 1, 20, 20), torch.ones(4, 1, 1, 1), torch.tensor([-0.0] * 4), implementation=implementation
    )
    assert (zero == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where_nothing_was_let_through_nothing_comes_back(implementation):
    """At exactly 0, ReLU's derivative is 0. Where y is NaN the gradient passes, as in PyTorch."""
    for last, dtype in itertools.product((False, True), DTYPES):
        x, weight, _ = tensors((2, 5, 6, 7), (40, 5, 3, 3), dtype, last)
        y = c.conv_bias_relu_forward(x, weight, torch.zeros(40).to(dtype), padding=1, implementation=implementation)
        y[0, 0, 0, 0], y[1, 39, 5, 6] = float("nan"), -0.0
        grad = torch.randint(-8, 9, y.shape).to(dtype)
        result = c.conv_bias_relu_backward(
            grad, y, x, weight, padding=1, needs=(False, False, True), implementation=implementation
        )
        assert result[:2] == (None, None)
        assert torch.equal(result[2].double(), torch.where(y <= 0, 0, grad.double()).sum((0, 2, 3)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bias_gradient_of_a_long_sum_is_right_to_the_last_bits(implementation):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 1, 300, 300), torch.ones(4, 1, 1, 1)
    for last in (False, True):
        y = torch.ones(4, 4, 300, 300).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        grad = torch.rand_like(y)
        got = c.conv_bias_relu_backward(grad, y, x, weight, needs=(False, False, True), implementation=implementation)
        exact, torch_sum = grad.double().sum((0, 2, 3)), grad.sum((0, 2, 3))
        assert ulp(got[2], exact, torch.float32) <= max(1.0, ulp(torch_sum, exact, torch.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_views_and_empty_batches(implementation):
    x, weight, bias = tensors((2, 3, 20, 20), (8, 3, 3, 3), torch.float32)
    expected = eager(x, weight, bias, (1, 1))
    for view in (
        x.transpose(2, 3).contiguous().transpose(2, 3),
        torch.empty(2, 3, 20, 40)[..., ::2].copy_(x),
        torch.empty(4, 3, 20, 20)[::2].copy_(x),
        x[:, :1].expand(2, 3, 20, 20),
    ):
        y = c.conv_bias_relu(view, weight, bias, padding=1, implementation=implementation)
        torch.testing.assert_close(y, eager(view, weight, bias, (1, 1)))
        assert view.stride(1) == 0 or torch.allclose(y, expected, atol=1e-5)
    strided = torch.empty(8, 3, 3, 6)[..., ::2].copy_(weight), torch.empty(16)[::2].copy_(bias)
    y = c.conv_bias_relu(x, *strided, padding=1, implementation=implementation)
    torch.testing.assert_close(y, expected)
    leaves = [t.detach().requires_grad_() for t in (torch.empty(0, 3, 20, 20), weight, bias)]
    y = c.conv_bias_relu(*leaves, implementation=implementation)
    assert y.shape == (0, 8, 18, 18)
    assert [g.shape for g in torch.autograd.grad(y, leaves, torch.ones_like(y))] == [t.shape for t in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_first_and_second_derivatives(implementation):
    torch.manual_seed(0)
    double = {"dtype": torch.float64, "requires_grad": True}
    for x_size, w_size, geometry in (
        ((2, 4, 5, 4), (2, 2, 3, 2), ((2, 1), 1, (1, 2), 2)),
        ((1, 1, 4, 18), (2, 1, 3, 3), (1, 1, 1, 1)),
    ):
        leaves = [torch.randn(size, **double) for size in (x_size, w_size, w_size[:1])]
        f = lambda x, w, b, g=geometry: c.conv_bias_relu(x, w, b, *g, implementation=implementation)  # noqa: E731
        assert torch.autograd.gradcheck(f, leaves)
        assert torch.autograd.gradgradcheck(f, leaves)
    x, _, bias = (leaf.detach() for leaf in leaves)
    # This is as in a first layer, where x needs no gradient.
    assert torch.autograd.gradgradcheck(lambda w: f(x, w, bias), (leaves[1],))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast_lowers_precision_as_conv2d_does(implementation):
    x, weight, bias = (t.requires_grad_() for t in tensors((2, 3, 20, 20), (8, 3, 3, 3), torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = c.conv_bias_relu(x, weight, bias, implementation=implementation), eager(x, weight, bias, ())
        mixed = c.conv_bias_relu(x.bfloat16(), weight, bias, implementation=implementation)
    assert y.dtype is expected.dtype is mixed.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    for a, b in zip(*(torch.autograd.grad(v.float().sum(), (x, weight, bias)) for v in (y, expected)), strict=True):
        assert a.dtype is b.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@needs_cpp
@pytest.mark.parametrize("implementation", ["auto", "cpp"])
def test_what_fits_is_not_checked_in_python(implementation, monkeypatch):
    monkeypatch.setattr(c, "_geometry", lambda *_: pytest.fail("the checks in Python ran"))
    for x_shape, w_shape, geometry in SHAPES:
        tensors_of_call = tensors(x_shape, w_shape, torch.float32)
        for leaves in (tensors_of_call, [torch.nn.Parameter(t) for t in tensors_of_call]):
            y = c.conv_bias_relu(tensors_of_call[0], *leaves[1:], *geometry, implementation=implementation)
            torch.testing.assert_close(y, eager(*tensors_of_call, geometry), rtol=1e-4, atol=1e-4)
            assert y.requires_grad == leaves[1].requires_grad


FITTING = {"x": torch.ones(1, 2, 20, 30), "weight": torch.ones(4, 2, 3, 3), "bias": torch.ones(4), "stride": [1, 1]}
FITTING |= {"padding": [0, 0], "dilation": [1, 1], "groups": 1}


BAD = {
    "x": [*map(torch.ones, ((2, 20, 30), (1, 3, 20, 30), (1, 2, 20, 2))), FITTING["x"].int(), FITTING["x"].double()],
    "weight": [torch.ones(4, 2, 3), torch.ones(4, 2, 0, 3), torch.ones(4, 2, 3, 3).bfloat16()],
    "bias": [torch.ones(3), torch.ones(4, 1), torch.ones(4).half()],
    "stride": [[0, 1], [1], [1, 1, 1]],
    "padding": [[0, -1], [0, 2**62]],
    "dilation": [[0, 1], [2**62, 1], [10, 1]],
    "groups": [0, 3, -1],
}


@needs_cpp
@pytest.mark.parametrize("name", BAD)
def test_the_kernel_refuses_what_does_not_fit(name):
    """`conv_bias_relu` calls the operator first, and checks in Python only what it refuses."""
    registry.ready()
    assert torch.ops.gptscale.conv_bias_relu(*FITTING.values()).shape == (1, 4, 18, 28)
    for bad in BAD[name]:
        with pytest.raises(ValueError, match="the arguments do not fit together"):
            torch.ops.gptscale.conv_bias_relu(*(FITTING | {name: bad}).values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_beside_cudnn(dtype):
    for (x_shape, w_shape, geometry), last in itertools.product(SHAPES, (False, True)):
        x, weight, bias = tensors(x_shape, w_shape, dtype, last)
        exact = eager(x.double(), weight.double(), bias.double(), geometry)
        leaves = [t.cuda().requires_grad_() for t in (x, weight, bias)]
        with torch.backends.cudnn.flags(allow_tf32=False):
            y = c.conv_bias_relu(*leaves, *geometry, implementation="triton")
            # PyTorch's sums on a GPU and on a CPU are in different orders, and ours are in a third.
            of_torch = (ulp(eager(*on, geometry).cpu(), exact, dtype) for on in (leaves, (x, weight, bias)))
            assert ulp(y.cpu(), exact, dtype) <= max(4.0, 1.25 * max(of_torch))
            grad = torch.randn_like(y)
            own_gradients = torch.autograd.grad(y, leaves, grad)
            again = torch.autograd.grad(c.conv_bias_relu(*leaves, *geometry, implementation="triton"), leaves, grad)
        assert torch.equal(own_gradients[2], again[2])
        exact_leaves = [t.detach().double().cpu().requires_grad_() for t in leaves]
        exact_gradients = torch.autograd.grad(
            eager(*exact_leaves, geometry), exact_leaves, torch.where(y <= 0, 0, grad).double().cpu()
        )
        assert ulp(own_gradients[2].cpu(), exact_gradients[2], dtype) <= 8
