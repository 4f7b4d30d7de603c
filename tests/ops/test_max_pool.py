"""Max pooling: every implementation against PyTorch's own and a float64 reference, on each feature of the geometry."""

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from gptscale.ops import max_pool as m
from gptscale.ops import registry  # noqa: F401, named in a string below

IMPLEMENTATIONS = ["loop", "windows", "python", "cpp"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# In words: asked before the test, and not when tests are collected, because it may compile.
needs_cpp = pytest.mark.skipif(
    "not registry.ready()", reason="the C++ operators are not compiled here: gptscale prepare"
)


def implementations(names=IMPLEMENTATIONS):
    return [pytest.param(name, marks=needs_cpp) if name == "cpp" else name for name in names]


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", implementations())
def test_values_places_and_gradients_are_torchs(implementation, dtype):
    for k, (geometry, ceil_mode, size, last, odd) in enumerate(geometries(6 if implementation == "loop" else 60, 7)):
        if implementation == "loop":
            size = [min(n, limit) for n, limit in zip(size[::-1], (9, 9, 2, 1), strict=False)][::-1]
        x = sample(size, dtype, last, odd, seed=k)
        expected, indices = F.max_pool2d(x, *geometry, ceil_mode, return_indices=True)
        y, offsets = m.max_pool2d_with_offsets(x, *geometry, ceil_mode, implementation)
        assert y.dtype == dtype
        assert offsets.dtype == torch.int8
        assert same(y, expected)
        assert torch.equal(torchs_indices(offsets, x.shape, geometry), indices)
        grad = torch.randint(-8, 9, y.shape).to(dtype)
        gradient = m.max_pool2d_backward(grad, offsets, x.shape, *geometry, implementation=implementation)
        exact = torch.ops.aten.max_pool2d_with_indices_backward(
            grad.double(), x.double(), *geometry, ceil_mode, indices
        )
        assert torch.equal(gradient.double(), exact)
        if last and x.dim() == 4 and not x.is_contiguous():
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@needs_cpp
def test_kernels_for_wide_rows_many_channels_and_small_planes(dtype):
    """Each path of the C++ backward (by fours, by rows, by pixels, by planes, by bands), and its edges."""
    sizes = [
        (3, 2, 9, 41),
        (2, 3, 7, 230),
        (2, 40, 9, 11),
        (9, 5, 12, 13),
        (1, 2, 40, 500),
        (2, 17, 6, 7),
        (1, 1, 300, 70),
    ]
    windows = [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 3), (1, 1), (1, 1)), ((5, 4), (2, 3), (2, 1))]
    for size, (kernel, stride, padding), last in itertools.product(sizes, windows, (False, True)):
        x, geometry = sample(size, dtype, last, True), (kernel, stride, padding, (1, 1))
        y, offsets = m.max_pool2d_with_offsets(x, *geometry, implementation="cpp")
        expected, indices = F.max_pool2d(x, *geometry, return_indices=True)
        assert same(y, expected)
        assert torch.equal(torchs_indices(offsets, x.shape, geometry), indices)
        grad = torch.randint(-8, 9, y.shape).to(dtype)
        gradient = m.max_pool2d_backward(grad, offsets, x.shape, *geometry, implementation="cpp")
        exact = torch.ops.aten.max_pool2d_with_indices_backward(grad.double(), x.double(), *geometry, False, indices)
        assert torch.equal(gradient.double(), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@needs_cpp
def test_error_of_overlapping_sums_is_no_larger_than_torchs_own(dtype, record_property):
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
        record_property(f"ulp, torch's ulp (scale {scale:g}, channels_last {last})", errors)
        assert errors[0] <= errors[1]
        if dtype in (torch.bfloat16, torch.float16):
            assert ((own_gradient.double() - exact).abs() <= 0.51 * unit + 1e-6 * grad.double().abs().max()).all()


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
def test_first_and_second_derivatives(implementation):
    torch.manual_seed(0)
    x = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    for arguments in ((2,), (3, 2, 1), (3, 1, 1), (2, 3, 0, 2, True))[1 if implementation == "loop" else 0 :: 3]:
        pool = lambda v, a=arguments: m.max_pool2d(v, *a, implementation=implementation)  # noqa: E731
        assert torch.autograd.gradcheck(pool, (x,))
        assert torch.autograd.gradgradcheck(pool, (x,))


@needs_cpp
def test_torch_library_accepts_the_operators():
    torch.manual_seed(0)
    ops = torch.ops.gptscale
    for last, dim in ((False, 4), (True, 4), (False, 3)):
        x = torch.randn(2, 3, 8, 9).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        x = (x if dim == 4 else x[0]).detach().requires_grad_()
        geometry = ([3, 2], [2, 1], [1, 1], [1, 2])
        y, offsets = ops.max_pool2d(x, *geometry, True)
        grad = torch.randn_like(y).requires_grad_()
        torch.library.opcheck(ops.max_pool2d.default, (x, *geometry, True))
        torch.library.opcheck(ops.max_pool2d_backward.default, (grad, offsets, list(x.shape), *geometry))


def test_compile_and_export_take_it_whole():
    torch.manual_seed(0)

    class Twice(torch.nn.Module):
        def forward(self, x):
            return m.max_pool2d(m.max_pool2d(x, 3, 2, 1), 2)

    compiled = torch.compile(Twice(), fullgraph=True, dynamic=True, backend="aot_eager")
    for size in ((2, 3, 12, 16), (3, 3, 20, 12)):
        x = torch.randn(size, requires_grad=True)
        compiled_grad, eager_grad = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, Twice()))
        assert torch.equal(compiled_grad, eager_grad)
    exported = torch.export.export(Twice(), (torch.randn(2, 3, 12, 16),))
    called = [n.target for n in exported.graph.nodes if n.op == "call_function"]
    assert called.count(torch.ops.gptscale.max_pool2d.default) == 2


def test_autocast_takes_what_comes():
    with torch.autocast("cpu", torch.bfloat16):
        assert m.max_pool2d(torch.randn(1, 1, 4, 4), 2).dtype is torch.float32
        assert m.max_pool2d(torch.randn(1, 1, 4, 4).bfloat16(), 2).dtype is torch.bfloat16


@needs_cpp
def test_same_bits_from_run_to_run_and_for_any_number_of_threads():
    torch.manual_seed(0)
    before, ops = torch.get_num_threads(), torch.ops.gptscale
    try:
        for size, last in itertools.product([(8, 30, 40, 56), (1, 2, 300, 400), (200, 3, 14, 14)], (False, True)):
            x = torch.randn(size).to(memory_format=torch.channels_last if last else torch.contiguous_format)
            runs = []
            for threads in (1, 2, 2):
                torch.set_num_threads(threads)
                y, offsets = ops.max_pool2d(x, (3, 3), (1, 1), (1, 1), (1, 1), False)
                back = ops.max_pool2d_backward(y, offsets, x.shape, (3, 3), (1, 1), (1, 1), (1, 1))
                runs.append((y, offsets, back))
            assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


GUARD = r"""
#include "kernels.h"
#include <cstdlib>
#include <cstring>
#include <vector>
using namespace gptscale;
int main() {
    const int guard = 256;
    unsigned seed = 1;
    auto draw = [&](int n) { seed = seed * 1664525u + 1013904223u; return int((seed >> 8) % unsigned(n)); };
    for (int trial = 0; trial < 400; ++trial) {
        Dtype dtype = Dtype(trial % 4);
        int size = dtype == Dtype::f32 ? 4 : dtype == Dtype::f64 ? 8 : 2;
        bool common = trial % 3 == 0;  // the geometries that have kernels of their own
        Windows w{};
        w.channels = 1 + draw(40), w.channels_last = draw(2);
        w.kernel_h = w.kernel_w = 2 + draw(2), w.stride_h = w.stride_w = 1 + draw(2), w.dilation_h = w.dilation_w = 1;
        if (!common) w.kernel_w = 1 + draw(5), w.stride_w = 1 + draw(3), w.dilation_h = 1 + draw(2), w.dilation_w = 1 + draw(2);
        w.padding_h = draw(int(w.kernel_h / 2) + 1), w.padding_w = draw(int(w.kernel_w / 2) + 1);
        bool fours = trial % 5 == 0;  // 2x2 side by side, in rows shorter and longer than a vector
        if (fours) w.kernel_h = w.kernel_w = w.stride_h = w.stride_w = 2, w.dilation_h = w.dilation_w = 1;
        if (fours) w.padding_h = w.padding_w = 0, w.channels_last = false;
        w.height = 1 + (w.kernel_h - 1) * w.dilation_h + draw(20);
        w.width = 1 + (w.kernel_w - 1) * w.dilation_w + draw(common && !fours ? 260 : 40);
        w.out_height = (w.height + 2 * w.padding_h - w.dilation_h * (w.kernel_h - 1) - 1) / w.stride_h + 1;
        w.out_width = (w.width + 2 * w.padding_w - w.dilation_w * (w.kernel_w - 1) - 1) / w.stride_w + 1;
        int planes = w.channels_last ? 1 + draw(3) : 1 + draw(9), per = w.channels_last ? int(w.channels) : 1;
        size_t in = size_t(planes * w.height * w.width * per), out = size_t(planes * w.out_height * w.out_width * per);
        std::vector<char> x(in * size), g(out * size), y(out * size + 2 * guard, 0x5a), gx(in * size + 2 * guard, 0x5a);
        std::vector<char> at(out + 2 * guard, 0x5a);
        for (auto& c : x) c = char(draw(100));
        for (auto& c : g) c = char(draw(100));
        int8_t* offsets = (int8_t*)at.data() + guard;
        long rows = planes * w.out_height, some = rows / 2, row = w.out_width * per;
        pick(max_pool)(dtype, w, x.data(), y.data() + guard, offsets, 0, some);
        for (long i = some * row; i < rows * row; ++i)  // these may belong to another thread
            if (offsets[i] != 0x5a || y[guard + i * size] != 0x5a) return 2;
        pick(max_pool)(dtype, w, x.data(), y.data() + guard, offsets, some, rows);
        for (size_t i = 0; i < out; ++i) {
            if (offsets[i] < 0 || offsets[i] >= w.kernel_h * w.kernel_w) return 3;
            if (trial % 2) offsets[i] = int8_t(draw(256) - 128);  // from no forward: only the sum may be wrong
        }
        long half = planes * w.height / 2;
        pick(max_pool_backward)(dtype, w, g.data(), offsets, gx.data() + guard, 0, half);
        pick(max_pool_backward)(dtype, w, g.data(), offsets, gx.data() + guard, half, planes * w.height);
        for (auto* v : {&y, &gx, &at})
            for (int i = 0; i < guard; ++i)
                if ((*v)[i] != 0x5a || (*v)[v->size() - 1 - i] != 0x5a) return 1;
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
        includes = [f'#include "{name}"' for name in ("kernels.h", "numbers.inc", "lanes.inc", "max_pool.inc")]
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
        "import torch, torch.nn.functional as F; from gptscale.ops import max_pool as m; torch.manual_seed(0)\n"
        "for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):\n"
        "    for size in ((2, 3, 20, 45), (2, 40, 9, 11), (9, 5, 12, 13), (2, 2, 9, 230)):\n"
        "        for a in ((2, 2, 0), (3, 2, 1), (3, 1, 1)):\n"
        "            for f in (torch.contiguous_format, torch.channels_last):\n"
        "                x = torch.randint(-9, 9, size).to(dtype).to(memory_format=f)\n"
        "                y, o = m.max_pool2d_with_offsets(x, *a, implementation='cpp')\n"
        "                Y, O = m.max_pool2d_with_offsets(x, *a, implementation='python')\n"
        "                g = torch.randint(-9, 9, y.shape).to(dtype)\n"
        "                b, B = (m.max_pool2d_backward(g, o, size, *a, implementation=i) for i in ('cpp', 'python'))\n"
        "                assert torch.equal(y, Y) and torch.equal(o, O) and torch.equal(b, B)\n"
    )
    environment = {**os.environ, "GPTSCALE_ISA": isa}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=400)


X = torch.ones(2, 3, 8, 8)
AT = torch.zeros(2, 3, 4, 4, dtype=torch.int8)
BACK = m.max_pool2d_backward


@pytest.mark.parametrize("implementation", implementations([*IMPLEMENTATIONS, "auto"]))
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: m.max_pool2d([1.0], 2, implementation=i), TypeError, "x: a Tensor expected, not list"),
        (lambda i: m.max_pool2d(torch.ones(1, 4, 4).int(), 2, implementation=i), TypeError, "x: fp32, .*not torch.int32"),
        (lambda i: m.max_pool2d(torch.ones(4, 4), 2, implementation=i), ValueError, r"x: shape \(batch.* not \(4, 4\)"),
        (lambda i: m.max_pool2d(torch.ones(1, 1, 1, 4, 4), 2, implementation=i), ValueError, "x: shape"),
        (lambda i: m.max_pool2d(torch.ones(1, 0, 4), 2, implementation=i), ValueError, "x: .* is too small"),
        (lambda i: m.max_pool2d(X, 9, implementation=i), ValueError, r"x: \(2, 3, 8, 8\) is too small for windows of"),
        (lambda i: m.max_pool2d(X, (8, 16), implementation=i), ValueError, "kernel_size: at most 127 elements"),
        (lambda i: m.max_pool2d(X, 0, implementation=i), ValueError, "kernel_size: at least 1 expected, not 0"),
        (lambda i: m.max_pool2d(X, 2.0, implementation=i), TypeError, "kernel_size: one int or two expected, not 2.0"),
        (lambda i: m.max_pool2d(X, (2, 2, 2), implementation=i), ValueError, "kernel_size: one int or two expected"),
        (lambda i: m.max_pool2d(X, 2, 0, implementation=i), ValueError, "stride: at least 1 expected"),
        (lambda i: m.max_pool2d(X, 3, 1, 2, implementation=i), ValueError, r"padding: at most half of kernel_size \(3, 3\)"),
        (lambda i: m.max_pool2d(X, 2, 2, 0, 0, implementation=i), ValueError, "dilation: at least 1 expected"),
        (lambda i: BACK(X[..., :4, :4], AT.int(), X.shape, 2, implementation=i), TypeError, "offsets: an int8 Tensor"),
        (lambda i: BACK(X, AT, X.shape, 2, implementation=i), ValueError, r"offsets: grad's shape \(2, 3, 8, 8\)"),
        (lambda i: BACK(X[..., :4, :4], AT, (2, 3, 9), 2, implementation=i), ValueError, "input_size: 3 or 4 sizes"),
        (lambda i: BACK(X[..., :4, :4], AT, (2, 3, 6, 8), 2, implementation=i), ValueError, r"grad: shape \(2, 3, 3, 4\)"),
        (lambda i: BACK(X[..., :4, :4], AT.to("meta"), X.shape, 2, implementation=i), ValueError, "offsets: on meta"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message, implementation):
    with pytest.raises(error, match=message):
        call(implementation)


def test_an_implementation_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match="implementation: one of auto, loop, windows, python, cpp, triton expected, not 'cuda'"
    ):
        m.max_pool2d(X, 2, implementation="cuda")
    with pytest.raises(ValueError, match="implementation: triton needs tensors on a CUDA device, not on cpu"):
        m.max_pool2d(X, 2, implementation="triton")


@pytest.mark.slow
def test_without_a_compiler_python_does_the_work(tmp_path):
    code = (
        "import torch; from gptscale.ops.max_pool import max_pool2d\n"
        "x = torch.randn(1, 2, 5, 6, requires_grad=True, dtype=torch.float64)\n"
        "assert torch.autograd.gradcheck(lambda v: max_pool2d(v, 3, 2, 1), (x,))\n"
        "assert torch.autograd.gradgradcheck(lambda v: max_pool2d(v, 3, 2, 1), (x,))\n"
        "torch.library.opcheck(torch.ops.gptscale.max_pool2d.default, (x, [3, 3], [2, 2], [1, 1], [1, 1], False))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=400)


@pytest.mark.slow
def test_the_triton_kernels_under_its_interpreter():
    """The kernels need a GPU, but Triton's interpreter runs the same source on CPU tensors. It rounds bf16 in its own way."""
    pytest.importorskip("triton")
    code = (
        "import random, torch; from gptscale.ops import max_pool_python as p, max_pool_triton as t\n"
        "draw = random.Random(0).randint; torch.manual_seed(0)\n"
        "for n in range(30):\n"
        "    k, s, d = ((draw(1, 3), draw(1, 3)) for _ in range(3)); p = tuple(draw(0, v // 2) for v in k)\n"
        "    c, dtype = bool(draw(0, 1)), (torch.float32, torch.float64, torch.float16)[n % 3]\n"
        "    x = torch.randint(-3, 3, (2, 3, draw(7, 10), draw(7, 10))).to(dtype)\n"
        "    x[torch.rand(x.shape) < 0.1] = (float('nan'), -float('inf'))[n % 2]\n"
        "    x = x.to(memory_format=torch.channels_last) if draw(0, 1) else x[0] if draw(0, 1) else x\n"
        "    (y, o), (Y, O) = (f.max_pool2d(x, k, s, p, d, c) for f in (t, M))\n"
        "    assert torch.equal(y.nan_to_num(9), Y.nan_to_num(9)) and torch.equal(o, O) and y.stride() == Y.stride()\n"
        "    g = torch.randn(y.shape).to(dtype)\n"
        "    b, B = (f.max_pool2d_backward(g, o, x.shape, k, s, p, d) for f in (t, M))\n"
        "    assert torch.equal(b, B) and b.stride() == B.stride()\n"
        "assert t.max_pool2d(torch.empty(0, 2, 4, 4), (2, 2), (2, 2), (0, 0), (1, 1), False)[0].shape == (0, 2, 2, 2)\n"
    )
    code = code.replace("draw =", "M = type('M', (), {'max_pool2d': p.python_max_pool2d, 'max_pool2d_backward': "
                        "p.python_max_pool2d_backward}); draw =", 1)  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, timeout=400)


def test_the_triton_kernels_compile_for_a_gpu_that_is_not_here():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gptscale.ops import max_pool_triton as t

    sizes = {"size": "i64", **dict.fromkeys(("channels", "height", "width", "out_height", "out_width"), "i32")}
    kernels = {
        t._forward_kernel: {"x_ptr": "*bf16", "y_ptr": "*bf16", "offsets_ptr": "*i8"},
        t._backward_kernel: {"g_ptr": "*bf16", "offsets_ptr": "*i8", "gx_ptr": "*bf16"},
    }
    constants = t._constants(torch.bfloat16, (3, 3), (2, 2), (1, 1), (1, 1))
    for kernel, pointers in kernels.items():
        signature = {**pointers, **sizes, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


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
