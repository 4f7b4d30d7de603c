"""Max pooling: every implementation against PyTorch's own and a float64 reference, on each feature of the geometry."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from operators import DTYPES, implementations, needs_cpp

from gptscale.ops import max_pool as m

IMPLEMENTATIONS = implementations("loop", "windows", "python", "cpp")


def geometries(count, seed):
    """Return random windows and inputs that PyTorch accepts too.

    They overlap, are padded, dilated, in ceil mode, in both layouts, with 3 or 4 dimensions.
    """
    draw, cases = random.Random(seed), []
    while len(cases) < count:
        pairs = [(draw.randint(1, top), draw.randint(1, top)) for top in (4, 3, 2)]
        kernel, stride, dilation = pairs
        padding = tuple(draw.randint(0, k // 2) for k in kernel)
        size = [draw.randint(1, 3), draw.randint(1, 4), draw.randint(4, 23), draw.randint(4, 23)]
        geometry, ceil_mode = (kernel, stride, padding, dilation), draw.random() < 0.5
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        if all(n + 2 * p >= r and n >= r - p for n, p, r in zip(size[2:], padding, reach, strict=True)):
            size = size[1:] if draw.random() < 0.2 else size
            cases.append((geometry, ceil_mode, size, draw.random() < 0.5, draw.random() < 0.5))
    return cases


def sample(size, dtype, channels_last, odd, seed=0):
    """Return small integers, which give many ties and exact sums. With `odd`, NaN and infinities are among them."""
    torch.manual_seed(seed)
    x = torch.randint(-4, 5, size).to(dtype)
    if odd:
        for value in (float("nan"), float("inf"), -float("inf"), -0.0):
            x[torch.rand(size) < 0.08] = value
    return x.to(memory_format=torch.channels_last) if channels_last and len(size) == 4 else x


def torchs_indices(offsets, input_size, geometry):
    """Convert offsets in the window to PyTorch's indices in the plane."""
    kernel, stride, padding, dilation = geometry
    h = torch.arange(offsets.shape[-2])[:, None] * stride[0] - padding[0]
    w = torch.arange(offsets.shape[-1]) * stride[1] - padding[1]
    number = offsets.long()
    rows = h + number.div(kernel[1], rounding_mode="floor") * dilation[0]
    return rows * input_size[-1] + w + number % kernel[1] * dilation[1]


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(99.0), b.nan_to_num(99.0))


def compared_with_torch(x, geometry, ceil_mode, implementation):
    """Assert that values, places and gradient are torch's, and return the values and the gradient."""
    expected, indices = F.max_pool2d(x, *geometry, ceil_mode, return_indices=True)
    y, offsets = m.max_pool2d_with_offsets(x, *geometry, ceil_mode, implementation)
    assert (y.dtype, offsets.dtype) == (x.dtype, torch.int8)
    assert same(y, expected)
    assert torch.equal(torchs_indices(offsets, x.shape, geometry), indices)
    grad = torch.randint(-8, 9, y.shape).to(x.dtype)
    gradient = m.max_pool2d_backward(grad, offsets, x.shape, *geometry, implementation=implementation)
    exact = torch.ops.aten.max_pool2d_with_indices_backward(grad.double(), x.double(), *geometry, ceil_mode, indices)
    assert torch.equal(gradient.double(), exact)
    return y, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_places_and_gradients_are_torchs(implementation, dtype):
    count = {"loop": 6, "windows": 20}.get(implementation, 60)
    for k, (geometry, ceil_mode, size, last, odd) in enumerate(geometries(count, 7)):
        if count < 60:
            # Python walks from window to window.
            size = [min(n, limit) for n, limit in zip(size[::-1], (9, 9, 2, 1), strict=False)][::-1]
        x = sample(size, dtype, last, odd, seed=k)
        y, gradient = compared_with_torch(x, geometry, ceil_mode, implementation)
        if last and x.dim() == 4 and not x.is_contiguous():
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@needs_cpp
def test_kernels_for_wide_rows_many_channels_and_small_planes(dtype):
    """Each path of the C++ backward (by fours, by rows, by pixels, by planes, by bands), and its edges."""
    sizes = [(3, 2, 9, 41), (2, 3, 7, 230), (2, 40, 9, 11), (9, 5, 12, 13)]
    sizes += [(1, 2, 40, 500), (2, 17, 6, 7), (1, 1, 300, 70)]
    windows = [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 3), (1, 1), (1, 1)), ((5, 4), (2, 3), (2, 1))]
    for size, (kernel, stride, padding), last in itertools.product(sizes, windows, (False, True)):
        x, geometry = sample(size, dtype, last, True), (kernel, stride, padding, (1, 1))
        compared_with_torch(x, geometry, False, "cpp")


@pytest.mark.parametrize("dtype", DTYPES)
@needs_cpp
def test_error_of_overlapping_sums_is_no_larger_than_torchs_own(dtype):
    """Random, huge, tiny and denormal gradients, up to nine of them in a sum."""
    torch.manual_seed(0)
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    for last, scale in itertools.product((False, True), (1.0, tiny * 4, huge / 64)):
        x = sample((4, 40, 30, 120), dtype, last, False).add_(torch.rand(4, 40, 30, 120).to(dtype))
        geometry = ((3, 3), (1, 1), (1, 1), (1, 1))
        y, offsets = m.max_pool2d_with_offsets(x, *geometry, implementation="cpp")
        _, indices = F.max_pool2d(x, *geometry, return_indices=True)
        grad = (torch.randn(y.shape).clamp(-4, 4).double() * scale).to(dtype)
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        exact = backward(grad.double(), x.double(), *geometry, False, indices)
        own_gradient = m.max_pool2d_backward(grad, offsets, x.shape, *geometry, implementation="cpp")
        torch_gradient = backward(grad, x, *geometry, False, indices)
        unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(tiny)))) * torch.finfo(dtype).eps
        errors = [float(((g.double() - exact).abs() / unit).max()) for g in (own_gradient, torch_gradient)]
        assert errors[0] <= errors[1]
        if dtype in (torch.bfloat16, torch.float16):
            assert ((own_gradient.double() - exact).abs() <= 0.51 * unit + 1e-6 * grad.double().abs().max()).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_infinities_and_ties(implementation):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[[1.0, 1.0, -inf, -inf, nan, 2.0], [1.0, 1.0, -inf, -inf, nan, inf]]])
    y, offsets = m.max_pool2d_with_offsets(x, 2, implementation=implementation)
    assert same(y, torch.tensor([[[1.0, -inf, nan]]]))
    # These are the first of equal elements, and the last NaN.
    assert offsets.tolist() == [[[0, 0, 2]]]
    tiny = torch.tensor([[[1e-45, 0.0], [-0.0, -1e-45]]])
    y, offsets = m.max_pool2d_with_offsets(tiny, 2, implementation=implementation)
    assert y.item() == tiny[0, 0, 0].item() > 0
    assert offsets.item() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_all_of_padding_has_no_maximum_and_passes_no_gradient(implementation):
    """With dilation a window can miss the input. PyTorch 2.11 gives it an element that it does not have."""
    x = torch.ones(1, 1, 1, 1)
    geometry = ((2, 2), (1, 1), (1, 1), (2, 2))
    y, offsets = m.max_pool2d_with_offsets(x, *geometry, implementation=implementation)
    assert y.tolist() == [[[[-float("inf")]]]]
    assert offsets.tolist() == [[[[-1]]]]
    back = m.max_pool2d_backward(torch.ones(1, 1, 1, 1), offsets, x.shape, *geometry, implementation=implementation)
    assert back.tolist() == [[[[0.0]]]]
    upstream = torch.ones(1, 1, 1, 1, requires_grad=True)
    back = m.max_pool2d_backward(upstream, offsets, x.shape, *geometry, implementation=implementation)
    assert torch.autograd.grad(back.sum(), upstream)[0].item() == 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_views_and_empty_batches(implementation):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 6, 14)
    expected = F.max_pool2d(x, 2)
    views = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.empty(2, 2, 6, 28)[..., ::2].copy_(x),
        x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2),
        torch.empty(2, 2, 12, 14).to(memory_format=torch.channels_last)[:, :, ::2].copy_(x),
    )
    for view in views:
        leaf = view.detach().requires_grad_()
        y = m.max_pool2d(leaf, 2, implementation=implementation)
        assert torch.equal(y, expected)
        (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y).permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2))
        assert torch.equal(grad, (x == expected.repeat_interleave(2, 2).repeat_interleave(2, 3)).float())
    for size in ((0, 3, 4, 4), (2, 0, 4, 4)):
        empty = torch.empty(size, requires_grad=True)
        y = m.max_pool2d(empty, 2, implementation=implementation)
        assert y.shape == (*size[:2], 2, 2)
        assert torch.autograd.grad(y.sum(), empty)[0].shape == size


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_first_and_second_derivatives(implementation):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    for arguments in ((2,), (3, 2, 1), (3, 1, 1), (2, 3, 0, 2, True))[1 if implementation == "loop" else 0 :: 3]:
        pool = lambda v, a=arguments: m.max_pool2d(v, *a, implementation=implementation)  # noqa: E731
        assert torch.autograd.gradcheck(pool, (x,))
        assert torch.autograd.gradgradcheck(pool, (x,))


def test_autocast_takes_what_comes():
    with torch.autocast("cpu", torch.bfloat16):
        assert m.max_pool2d(torch.randn(1, 1, 4, 4), 2).dtype is torch.float32
        assert m.max_pool2d(torch.randn(1, 1, 4, 4).bfloat16(), 2).dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_as_on_the_cpu(dtype):
    for k, (geometry, ceil_mode, size, last, odd) in enumerate(geometries(40, 11)):
        x = sample(size, dtype, last, odd, seed=k)
        y, offsets = m.max_pool2d_with_offsets(x, *geometry, ceil_mode, "python")
        gpu_y, gpu_offsets = m.max_pool2d_with_offsets(x.cuda(), *geometry, ceil_mode, "triton")
        assert same(gpu_y.cpu(), y)
        assert torch.equal(gpu_offsets.cpu(), offsets)
        grad = torch.randint(-8, 9, y.shape).to(dtype)
        back = m.max_pool2d_backward(grad, offsets, x.shape, *geometry, implementation="python")
        gpu_back = m.max_pool2d_backward(grad.cuda(), gpu_offsets, x.shape, *geometry, implementation="triton")
        assert torch.equal(gpu_back.cpu(), back)
