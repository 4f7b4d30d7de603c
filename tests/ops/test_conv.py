"""Convolution + bias + ReLU: every implementation against PyTorch's own pair and a float64 reference, on each feature."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from gptscale.ops import conv as c
from gptscale.ops import registry

IMPLEMENTATIONS = ["python", "cpp"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# In words: asked before the test, and not when tests are collected, because it may compile.
needs_cpp = pytest.mark.skipif(
    "not registry.ready()", reason="the C++ operators are not compiled here: gptscale prepare"
)

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


def implementations(names=IMPLEMENTATIONS):
    return [pytest.param(name, marks=needs_cpp) if name == "cpp" else name for name in names]


def tensors(x_shape, w_shape, dtype, last=False, scale=1.0):
    torch.manual_seed(0)
    x, weight = torch.randn(x_shape).mul_(scale).to(dtype), torch.randn(w_shape).mul_(0.3).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    return x, weight, torch.randn(w_shape[0]).mul_(scale).to(dtype)


def eager(x, weight, bias, geometry):
    return F.relu(F.conv2d(x, weight, bias, *geometry))


def gradients(y, leaves, grad):
    return torch.autograd.grad(y, leaves, grad)


def ulp(result, exact, dtype):
    """Return the largest error in units in the last place of the largest exact value in its channel, because sums cancel."""
    result, exact = result.detach(), exact.detach()
    axes = (0, 2, 3) if exact.dim() == 4 else 0
    size = exact.abs().amax(axes, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
    unit = torch.exp2(torch.floor(torch.log2(size))) * torch.finfo(dtype).eps
    return float(((result.double() - exact).abs() / unit).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", implementations())
def test_values_and_gradients_against_float64_and_torchs_own(implementation, dtype, record_property):
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
            own_ulp, torch_ulp = ulp(y, exact, dtype), ulp(torch_y, exact, dtype)
            assert own_ulp <= max(torch_ulp, 1.0), (x_shape, last, scale)
            record_property(f"ulp, torch's ulp {x_shape} {w_shape} {geometry} {last} {scale}", (own_ulp, torch_ulp))
            assert y.dtype == dtype
            # All three get the same mask, so that gradients are compared and not decisions at zero.
            mask = (y > 0) & (torch_y > 0) & (exact > 0)
            grad = torch.where(mask, grad, 0)
            triples = zip(
                gradients(y, own_in, grad),
                gradients(torch_y, torch_in, grad),
                gradients(exact, exact_in, grad.double()),
                strict=True,
            )
            for own_grad, torch_grad, exact_grad in triples:
                torch_ulp = ulp(torch_grad, exact_grad, dtype)
                assert ulp(own_grad, exact_grad, dtype) <= max(torch_ulp, 3.0), (x_shape, last, scale)


@pytest.mark.parametrize("implementation", implementations())
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
        back, other = (gradients(v, (x,), torch.ones_like(v))[0] for v in (y, expected))
        assert torch.equal(back.isnan(), other.isnan())
    zero = c.conv_bias_relu(
        torch.zeros(1, 1, 20, 20), torch.ones(4, 1, 1, 1), torch.tensor([-0.0] * 4), implementation=implementation
    )
    assert (zero == 0).all()


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
def test_bias_gradient_of_a_long_sum_is_right_to_the_last_bits(implementation):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 1, 300, 300), torch.ones(4, 1, 1, 1)
    for last in (False, True):
        y = torch.ones(4, 4, 300, 300).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        grad = torch.rand_like(y)
        result = c.conv_bias_relu_backward(
            grad, y, x, weight, needs=(False, False, True), implementation=implementation
        )
        exact, torch_sum = grad.double().sum((0, 2, 3)), grad.sum((0, 2, 3))
        assert ulp(result[2], exact, torch.float32) <= max(1.0, ulp(torch_sum, exact, torch.float32))


@pytest.mark.parametrize("implementation", implementations())
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
    assert [g.shape for g in gradients(y, leaves, torch.ones_like(y))] == [t.shape for t in leaves]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.slow
@needs_cpp
def test_torch_library_accepts_the_operators():
    ops = torch.ops.gptscale
    for (x_shape, w_shape, geometry), last in itertools.product((SHAPES[0], SHAPES[7]), (False, True)):
        x, weight, bias = tensors((1, *x_shape[1:]), w_shape, torch.float32, last)
        pairs = [list(torch.nn.modules.utils._pair(v)) for v in geometry[:3]]
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        y = ops.conv_bias_relu(*leaves, *pairs, geometry[3])
        grad = torch.randn_like(y).requires_grad_()
        torch.library.opcheck(ops.conv_bias_relu.default, (*leaves, *pairs, geometry[3]))
        arguments = (grad, y.detach(), *leaves[:2], *pairs, geometry[3], [not last, True, True])
        torch.library.opcheck(ops.conv_bias_relu_backward.default, arguments)


@pytest.mark.slow
def test_compile_and_export_take_it_whole():
    x, weight, bias = (t.requires_grad_() for t in tensors((2, 3, 20, 20), (8, 3, 3, 3), torch.float32))

    class Twice(torch.nn.Module):
        def forward(self, x, weight, bias):
            y = c.conv_bias_relu(x, weight, bias, padding=1)
            return c.conv_bias_relu(y[:, :3], weight, bias, stride=2)

    compiled = torch.compile(Twice(), fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        leaves = (x[:1].expand(batch, 3, 20, 20).detach().requires_grad_(), weight, bias)
        compiled_gradients, eager_gradients = (
            gradients(f(*leaves), leaves, torch.ones(batch, 8, 9, 9)) for f in (compiled, Twice())
        )
        for a, b in zip(compiled_gradients, eager_gradients, strict=True):
            torch.testing.assert_close(a, b)
    exported = torch.export.export(Twice(), tuple(t.detach() for t in (x, weight, bias)))
    called = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert called.count(torch.ops.gptscale.conv_bias_relu.default) == 2


@pytest.mark.parametrize("implementation", implementations())
def test_autocast_lowers_precision_as_conv2d_does(implementation):
    x, weight, bias = (t.requires_grad_() for t in tensors((2, 3, 20, 20), (8, 3, 3, 3), torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = c.conv_bias_relu(x, weight, bias, implementation=implementation), eager(x, weight, bias, ())
        mixed = c.conv_bias_relu(x.bfloat16(), weight, bias, implementation=implementation)
    assert y.dtype is expected.dtype is mixed.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    for a, b in zip(*(gradients(v.float().sum(), (x, weight, bias), None) for v in (y, expected)), strict=True):
        assert a.dtype is b.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@needs_cpp
def test_same_bits_from_run_to_run_and_for_any_number_of_threads():
    """For the kernels of this package: the convolution of few channels, its weight gradient, the mask, the bias gradient."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    try:
        for x_shape, last in itertools.product(((5, 3, 40, 50), (1, 1, 200, 64)), (False, True)):
            x, weight, bias = tensors(x_shape, (9, x_shape[1], 3, 3), torch.float32)
            y = c.conv_bias_relu_forward(x, weight, bias)
            y = y.to(memory_format=torch.channels_last) if last else y
            grad, runs = torch.randn_like(y), []
            for threads in (1, 2, 2):
                torch.set_num_threads(threads)
                back = c.conv_bias_relu_backward(grad, y, x, weight, needs=(False, True, True))
                runs.append((c.conv_bias_relu_forward(x, weight, bias), back[1], back[2]))
            assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


GUARD = r"""
#include "kernels.h"
#include <cstdlib>
#include <vector>
using namespace gptscale;
int main() {
    unsigned seed = 1;
    auto draw = [&](int n) { seed = seed * 1664525u + 1013904223u; return int((seed >> 8) % unsigned(n)); };
    for (int trial = 0; trial < 120; ++trial) {
        Convolution c{};
        c.channels = 1 + draw(4), c.kernel_h = 1 + draw(5), c.kernel_w = 1 + draw(5), c.stride_h = 1 + draw(3);
        c.stride_w = 1 + draw(3), c.dilation_h = 1 + draw(2), c.dilation_w = 1 + draw(2), c.padding_h = draw(4);
        c.padding_w = draw(4), c.out_channels = 1 + draw(20), c.height = (c.kernel_h - 1) * c.dilation_h + 1 + draw(6);
        c.width = (c.kernel_w - 1) * c.dilation_w + c.stride_w * (15 + draw(50)) + 1;
        c.padded_height = c.height + 2 * c.padding_h;
        c.out_height = (c.padded_height - c.dilation_h * (c.kernel_h - 1) - 1) / c.stride_h + 1;
        c.out_width = (c.width + 2 * c.padding_w - c.dilation_w * (c.kernel_w - 1) - 1) / c.stride_w + 1;
        c.phase = (c.width + 2 * c.padding_w + c.stride_w - 1) / c.stride_w, c.pitch = c.phase * c.stride_w;
        for (int j = 0; j < c.kernel_w; ++j)
            c.tap[j] = j * c.dilation_w % c.stride_w * c.phase + j * c.dilation_w / c.stride_w;
        if (c.out_width < pick(lanes)()) return 3;
        int images = 2, blocks = int(c.out_channels + CONVOLUTION_BLOCK - 1) / CONVOLUTION_BLOCK;
        std::vector<float> x(images * c.channels * c.height * c.width, 1.0f);
        std::vector<float> padded(images * c.channels * c.padded_height * c.pitch);
        std::vector<float> weight(blocks * CONVOLUTION_BLOCK * c.channels * c.kernel_h * c.kernel_w, 0.5f);
        std::vector<float> bias(blocks * CONVOLUTION_BLOCK, 1.0f), y(images * c.out_channels * c.out_height * c.out_width, -1.0f);
        for (int p = 0; p < images * c.channels; ++p)
            pick(pad_plane)(c, &x[p * c.height * c.width], &padded[p * c.padded_height * c.pitch]);
        pick(conv_bias_relu_rows)(c, padded.data(), weight.data(), bias.data(), y.data(), 0, images * c.out_height);
        for (float v : y)
            if (!(v >= 1.0f)) return 1;
        int taps = int(c.channels * c.kernel_h * c.kernel_w);
        std::vector<double> gradient(c.out_channels * taps);
        pick(conv_weight_gradient)(c, padded.data(), y.data(), gradient.data(), 0, images);
        int out = draw(int(c.out_channels)), tap = draw(taps), j = tap % int(c.kernel_w), i = tap / int(c.kernel_w);
        double expected = 0;
        for (int n = 0; n < images; ++n)
            for (int oh = 0; oh < c.out_height; ++oh)
                for (int ow = 0; ow < c.out_width; ++ow)
                    expected += double(y[((n * c.out_channels + out) * c.out_height + oh) * c.out_width + ow]) *
                                padded[((n * c.channels + i / c.kernel_h) * c.padded_height + oh * c.stride_h +
                                        i % c.kernel_h * c.dilation_h) * c.pitch + c.tap[j] + ow];
        double found = gradient[out * taps + tap];
        if (!(found <= expected * 1.00001 && found >= expected * 0.99999)) return 2;
        for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
            int size = dtype == Dtype::f32 ? 4 : 2, planes = 1 + draw(5), length = 1 + draw(3000);
            std::vector<char> g(planes * length * size, 1), from(g.size(), 1), masked(g.size());
            std::vector<double> sums(planes);
            pick(relu_backward_planes)(dtype, g.data(), from.data(), masked.data(), sums.data(), planes, length);
            std::vector<float> channel_sums(length);
            pick(relu_backward_pixels)(dtype, g.data(), from.data(), masked.data(), channel_sums.data(), planes, length);
        }
    }
    return 0;
}
"""


@pytest.mark.slow
@needs_cpp
def test_nothing_is_touched_outside_the_tensors(tmp_path):
    """The kernels of each instruction set are compiled with the address sanitizer."""
    from gptscale.ops.build.sources import FLAGS, FOLDER

    (tmp_path / "guard.cpp").write_text(GUARD)
    for isa, target in (("baseline", ""), ("avx2", "arch=x86-64-v3"), ("avx512", "arch=x86-64-v4")):
        lines = [f"#define ISA {isa}"]
        if target:
            lines = [f'#pragma GCC target("{target}")', *lines, "#include <immintrin.h>"]
        if isa == "avx512":
            lines.append("#define ISA_IS_AVX512")
        includes = [f'#include "{name}"' for name in ("kernels.h", "numbers.inc", "lanes.inc", "conv.inc")]
        (tmp_path / f"{isa}.cpp").write_text("\n".join(lines + includes))
    files = [
        tmp_path / "guard.cpp",
        FOLDER / "isa.cpp",
        *(tmp_path / f"{i}.cpp" for i in ("baseline", "avx2", "avx512")),
    ]
    words = [os.environ.get("CXX", "c++"), *FLAGS, "-O1", "-fsanitize=address", f"-I{FOLDER}", *files]
    program = tmp_path / "guard"
    subprocess.run([*map(str, words), "-o", str(program)], check=True, capture_output=True, timeout=400)
    for isa in ("baseline", "avx2", "avx512"):
        environment = {**os.environ, "GPTSCALE_ISA": isa}
        ended = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert ended.returncode == 0, f"{isa}: {ended.returncode} {ended.stderr[:2000]}"


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(isa):
    code = (
        "import torch, torch.nn.functional as F; from gptscale.ops import conv as c; torch.manual_seed(0)\n"
        "for xs, ws, g in (((2, 3, 32, 35), (13, 3, 3, 3), (1, 1)), ((2, 2, 40, 50), (8, 2, 3, 5), ((2, 3), (0, 4), (2, 1)))):\n"
        "    for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "        x, w, b = torch.randn(xs).to(dtype), torch.randn(ws).mul(0.3).to(dtype), torch.randn(ws[0]).to(dtype)\n"
        "        y, eps = c.conv_bias_relu(x, w, b, *g, implementation='cpp'), torch.finfo(dtype).eps\n"
        "        exact = F.relu(F.conv2d(x.double(), w.double(), b.double(), *g))\n"
        "        torch.testing.assert_close(y.double(), exact, rtol=eps, atol=16 * eps)\n"
        "        for f in (torch.contiguous_format, torch.channels_last):\n"
        "            y = y.contiguous(memory_format=f); grad = torch.randint(-8, 9, y.shape).to(dtype)\n"
        "            back = c.conv_bias_relu_backward(grad, y, x, w, *g, needs=(False, False, True), implementation='cpp')[2]\n"
        "            exact = torch.where(y <= 0, 0, grad.double()).sum((0, 2, 3))\n"
        "            torch.testing.assert_close(back.double(), exact, rtol=eps, atol=0)\n"
    )
    environment = {**os.environ, "GPTSCALE_ISA": isa}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=400)


X, W, B = torch.ones(2, 4, 8, 8), torch.ones(6, 2, 3, 3), torch.ones(6)
Y = torch.ones(2, 6, 6, 6)
BACK = c.conv_bias_relu_backward


@pytest.mark.parametrize("implementation", implementations([*IMPLEMENTATIONS, "auto"]))
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: c.conv_bias_relu([1.0], W, B, implementation=i), TypeError, "x: a Tensor expected, not list"),
        (lambda i: c.conv_bias_relu(X.int(), W, B, groups=2, implementation=i), TypeError, "x: fp32, .*not torch.int32"),
        (lambda i: c.conv_bias_relu(X, W.double(), B, groups=2, implementation=i), TypeError, "weight: torch.float32"),
        (lambda i: c.conv_bias_relu(X, W, B.to("meta"), groups=2, implementation=i), ValueError, "bias: on meta"),
        (lambda i: c.conv_bias_relu(X, W, None, groups=2, implementation=i), TypeError, "bias: a Tensor expected"),
        (lambda i: c.conv_bias_relu(X[0], W, B, groups=2, implementation=i), ValueError, r"x: shape \(batch, channels"),
        (lambda i: c.conv_bias_relu(X, W[0], B, groups=2, implementation=i), ValueError, r"weight: shape \(out channels"),
        (lambda i: c.conv_bias_relu(X, W, B, implementation=i), ValueError, r"weight: shape \(6, 2, 3, 3\) with groups=1"),
        (lambda i: c.conv_bias_relu(X, W, B, groups=4, implementation=i), ValueError, "groups: a divisor of weight's 6"),
        (lambda i: c.conv_bias_relu(X, W, B, groups=True, implementation=i), TypeError, "groups: an int expected"),
        (lambda i: c.conv_bias_relu(X, W, B[:5], groups=2, implementation=i), ValueError, r"bias: shape \(6,\) expected"),
        (lambda i: c.conv_bias_relu(X, W, B[:, None], groups=2, implementation=i), ValueError, r"bias: shape \(6,\)"),
        (lambda i: c.conv_bias_relu(X, W, B, 0, groups=2, implementation=i), ValueError, "stride: at least 1 expected"),
        (lambda i: c.conv_bias_relu(X, W, B, 1, -1, groups=2, implementation=i), ValueError, "padding: at least 0"),
        (lambda i: c.conv_bias_relu(X, W, B, 1, "same", groups=2, implementation=i), TypeError, "padding: one int or two"),
        (lambda i: c.conv_bias_relu(X, W, B, 1, 0, 4, 2, i), ValueError, r"x: \(2, 4, 8, 8\) is too small for weight"),
        (lambda i: c.conv_bias_relu(X, W, B, True, groups=2, implementation=i), TypeError, "stride: one int or two"),
        (lambda i: c.conv_bias_relu(X, W, B, (1, True), groups=2, implementation=i), TypeError, "stride: one int or two"),
        (lambda i: c.conv_bias_relu(X, W, B, (1,), groups=2, implementation=i), ValueError, "stride: one int or two"),
        (lambda i: c.conv_bias_relu(X, W, B, 1, 1.0, groups=2, implementation=i), TypeError, "padding: one int or two"),
        (lambda i: c.conv_bias_relu(X, W.to_sparse(), B, groups=2, implementation=i), TypeError, "weight: a dense tensor"),
        (lambda i: c.conv_bias_relu(X, W.cfloat(), B, groups=2, implementation=i), TypeError, "weight: fp32, fp64, bf16"),
        (lambda i: c.conv_bias_relu(X, W[:0], B[:0], implementation=i), ValueError, "none of them 0, expected"),
        (lambda i: BACK(Y[:1], Y, X, W, groups=2, implementation=i), ValueError, r"grad: shape \(2, 6, 6, 6\) expected"),
        (lambda i: BACK(Y, Y[..., :5], X, W, groups=2, implementation=i), ValueError, r"y: shape \(2, 6, 6, 6\) expected"),
        (lambda i: BACK(Y, Y, X, W, groups=2, needs=(1, 1), implementation=i), TypeError, "needs: three bools expected"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message, implementation):
    with pytest.raises(error, match=message):
        call(implementation)


@needs_cpp
@pytest.mark.parametrize("implementation", ["auto", "cpp"])
def test_what_fits_is_not_checked_in_python(implementation, monkeypatch):
    monkeypatch.setattr(c, "_check", lambda *_: pytest.fail("the checks in Python ran"))
    for x_shape, w_shape, geometry in SHAPES:
        tensors_of_call = tensors(x_shape, w_shape, torch.float32)
        for leaves in (tensors_of_call, [torch.nn.Parameter(t) for t in tensors_of_call]):
            y = c.conv_bias_relu(tensors_of_call[0], *leaves[1:], *geometry, implementation=implementation)
            torch.testing.assert_close(y, eager(*tensors_of_call, geometry), rtol=1e-4, atol=1e-4)
            assert y.requires_grad == leaves[1].requires_grad


FITTING = {"x": torch.ones(1, 2, 20, 30), "weight": torch.ones(4, 2, 3, 3), "bias": torch.ones(4), "stride": [1, 1]}
FITTING |= {"padding": [0, 0], "dilation": [1, 1], "groups": 1}


@needs_cpp
@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(2, 20, 30)},
        {"x": torch.ones(1, 3, 20, 30)},
        {"x": torch.ones(1, 2, 20, 2)},
        {"x": torch.ones(1, 2, 20, 30).int()},
        {"x": torch.ones(1, 2, 20, 30).double()},
        {"weight": torch.ones(4, 2, 3)},
        {"weight": torch.ones(4, 2, 0, 3)},
        {"weight": torch.ones(4, 2, 3, 3).bfloat16()},
        {"bias": torch.ones(3)},
        {"bias": torch.ones(4, 1)},
        {"bias": torch.ones(4).half()},
        {"stride": [0, 1]},
        {"stride": [1]},
        {"stride": [1, 1, 1]},
        {"padding": [0, -1]},
        {"padding": [0, 2**62]},
        {"dilation": [0, 1]},
        {"dilation": [2**62, 1]},
        {"dilation": [10, 1]},
        {"groups": 0},
        {"groups": 3},
        {"groups": -1},
    ],
)  # fmt: skip
def test_the_kernel_refuses_what_does_not_fit(change):
    """`conv_bias_relu` calls the operator first, and checks in Python only what it refuses."""
    registry.ready()
    assert torch.ops.gptscale.conv_bias_relu(*FITTING.values()).shape == (1, 4, 18, 28)
    with pytest.raises(ValueError, match="the arguments do not fit together"):
        torch.ops.gptscale.conv_bias_relu(*(FITTING | change).values())


def test_an_implementation_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="implementation: one of auto, python, cpp, triton expected, not 'loop'"):
        c.conv_bias_relu(X, W, B, groups=2, implementation="loop")
    with pytest.raises(ValueError, match="implementation: triton needs tensors on a CUDA device, not on cpu"):
        c.conv_bias_relu(X, W, B, groups=2, implementation="triton")


@pytest.mark.slow
def test_without_a_compiler_python_does_the_work(tmp_path):
    code = (
        "import torch; from gptscale.ops.conv import conv_bias_relu\n"
        "leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 4, 5), (2, 2, 3, 3), (2,))]\n"
        "assert torch.autograd.gradcheck(lambda *a: conv_bias_relu(*a, padding=1), leaves)\n"
        "assert torch.autograd.gradgradcheck(lambda *a: conv_bias_relu(*a, padding=1), leaves)\n"
        "torch.library.opcheck(torch.ops.gptscale.conv_bias_relu.default, (*leaves, [1, 1], [1, 1], [1, 1], 1))\n"
        "x, w, b = (v.detach().float() for v in leaves)\n"
        "with torch.autocast('cpu', torch.bfloat16): assert conv_bias_relu(x, w, b).dtype is torch.bfloat16\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=400)


def random_cases(count):
    draw, cases = random.Random(0).randint, []
    for n in range(count):
        groups, last = draw(1, 2), draw(0, 1) == 1
        kernel, stride, dilation, padding = (
            (draw(lo, hi), draw(lo, hi)) for lo, hi in ((1, 3), (1, 2), (1, 2), (0, 2))
        )
        x = (2, groups * draw(1, 3), draw(6, 9), draw(6, 9))
        cases.append((x, (groups * draw(1, 3), x[1] // groups, *kernel), (stride, padding, dilation, groups), last, n))
    return cases


@pytest.mark.slow
def test_the_triton_kernels_under_its_interpreter():
    """The kernels need a GPU, but Triton's interpreter runs the same source on CPU tensors, except dot products in bf16."""
    pytest.importorskip("triton")
    code = (
        f"CASES = {random_cases(12)!r}\n"
        "import torch, torch.nn.functional as F; from gptscale.ops import conv as c, conv_python as p, conv_triton as t\n"
        "torch.manual_seed(0)\n"
        "for xs, ws, g, last, n in CASES:\n"
        "    dtype = (torch.float32, torch.float16)[n % 2]; eps = torch.finfo(dtype).eps\n"
        "    x, w, b = torch.randn(xs).to(dtype), torch.randn(ws).to(dtype), torch.randn(ws[0]).to(dtype)\n"
        "    x = x.to(memory_format=torch.channels_last) if last else x\n"
        "    y = t.conv_bias_relu(x, w, b, *g)\n"
        "    exact = F.relu(F.conv2d(x.double(), w.double(), b.double(), *g))\n"
        "    torch.testing.assert_close(y.double(), exact, rtol=2 * eps, atol=16 * torch.finfo(torch.float32).eps)\n"
        "    assert y.stride() == c._fake(x.to('meta'), w, b, *g).stride()\n"
        "    grad = torch.randn(y.shape).to(dtype)\n"
        "    for u, v in zip(t.conv_bias_relu_backward(grad, y, x, w, *g, (True,) * 3),\n"
        "                    p.python_conv_bias_relu_backward(grad, y, x, w, *g, (True,) * 3)):\n"
        "        torch.testing.assert_close(u, v, rtol=4 * eps, atol=4 * eps)\n"
        "for last in (False, True):\n"
        "    y = torch.randn(3, 150, 9, 31).bfloat16(); g = torch.randint(-4, 5, y.shape).bfloat16()\n"
        "    y = y.to(memory_format=torch.channels_last) if last else y; y[0, 0, 0, 0] = float('nan')\n"
        "    masked, sums = t.mask_and_sum(g, y); exact = torch.where(y <= 0, 0, g)\n"
        "    assert torch.equal(masked, exact) and torch.equal(sums, exact.sum((0, 2, 3)))\n"
        "x, w, one = torch.tensor([[[[float('nan'), 1.0]]]]), torch.ones(1, 1, 1, 1), (1, 1)\n"
        "y = t.conv_bias_relu(x, w, torch.ones(1), one, (0, 0), one, 1)\n"
        "assert y.isnan().tolist() == [[[[True, False]]]]\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, timeout=400)


def test_the_triton_kernels_compile_for_a_gpu_that_is_not_here():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gptscale.ops import conv_triton as t

    blocks = {"BLOCK_M": t.BLOCK_M, "BLOCK_N": t.BLOCK_N, "BLOCK_K": t.BLOCK_K, "PRECISION": "tf32", "IN_CHANNELS": 64}
    pairs = {"KERNEL": 3, "STRIDE": 1, "PADDING": 1, "DILATION": 1}
    forward = {**blocks, **{f"{name}_{axis}": n for name, n in pairs.items() for axis in "HW"}}
    mask = {"OVER_ROWS": True, "ROWS": t.ROWS, "COLUMNS": t.COLUMNS, "STEPS": t.STEPS}
    for kernel, constants in ((t._forward_kernel, forward), (t._mask_kernel, mask)):
        types = {
            name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names if name not in constants
        }
        if "sums_ptr" in types:
            types["sums_ptr"] = "*fp32"
        source = ASTSource(
            fn=kernel, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert compiled.asm["cubin"]
        assert kernel is t._mask_kernel or "wgmma" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_beside_cudnn(dtype):
    for (x_shape, w_shape, geometry), last in itertools.product(SHAPES, (False, True)):
        x, weight, bias = tensors(x_shape, w_shape, dtype, last)
        exact = eager(x.double(), weight.double(), bias.double(), geometry)
        leaves = [t.cuda().requires_grad_() for t in (x, weight, bias)]
        with torch.backends.cudnn.flags(allow_tf32=False):
            y = c.conv_bias_relu(*leaves, *geometry, implementation="triton")
            assert ulp(y.cpu(), exact, dtype) <= max(4.0, 1.25 * ulp(eager(*leaves, geometry).cpu(), exact, dtype))
            grad = torch.randn_like(y)
            own_gradients = gradients(y, leaves, grad)
            again = gradients(c.conv_bias_relu(*leaves, *geometry, implementation="triton"), leaves, grad)
        assert torch.equal(own_gradients[2], again[2])
        exact_leaves = [t.detach().double().cpu().requires_grad_() for t in leaves]
        exact_gradients = gradients(
            eager(*exact_leaves, geometry), exact_leaves, torch.where(y <= 0, 0, grad).double().cpu()
        )
        assert ulp(own_gradients[2].cpu(), exact_gradients[2], dtype) <= 8
