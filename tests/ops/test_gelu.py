"""GELU and bias+GELU: every implementation against float64, beside PyTorch's own on the same numbers."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptscale.ops import gelu as g
from gptscale.ops import registry  # noqa: F401, named in a string below
from gptscale.ops.build import kernels

VARIANTS = g.APPROXIMATE
IMPLEMENTATIONS = ["python", "cpp"]
NARROW = [torch.float32, torch.bfloat16, torch.float16]

# In words: asked before the test, and not when tests are collected, because it may compile.
needs_cpp = pytest.mark.skipif(
    "not registry.ready()", reason="the C++ operators are not compiled here: gptscale prepare"
)


def implementations(names=IMPLEMENTATIONS):
    return [pytest.param(name, marks=needs_cpp) if name == "cpp" else name for name in names]


def torchs_own(x, variant):
    """Compute GELU as a user of PyTorch would write it."""
    return (
        x * torch.sigmoid(1.702 * x)
        if variant == "sigmoid"
        else F.gelu(x, approximate="none" if variant == "erf" else variant)
    )


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
def test_error_is_no_larger_than_torchs_own(variant, dtype, record_property):
    x = numbers(dtype)
    exact, slope = g.python_gelu(x.double(), variant), g.python_gelu_backward(torch.ones(()), x.double(), variant)
    own_error, torch_error = ulp(g.gelu(x, variant), exact, dtype), ulp(torchs_own(x, variant), exact, dtype)
    own_slope_error = ulp(derivative(lambda v: g.gelu(v, variant, "cpp"), x), slope, dtype)
    torch_slopes = derivative(lambda v: torchs_own(v, variant), x)
    # PyTorch's derivative is NaN at some x where ours is not.
    finite = torch.isfinite(torch_slopes)
    torch_slope_error = ulp(torch_slopes[finite], slope[finite], dtype)
    for name, value in {
        "ulp": own_error,
        "ulp_torch": torch_error,
        "ulp_back": own_slope_error,
        "ulp_back_torch": torch_slope_error,
    }.items():
        record_property(name, value)
    assert own_error <= torch_error
    assert own_slope_error <= torch_slope_error
    assert own_error <= (64 if dtype is torch.float32 else 0.51)
    near = x.abs() < 5.6
    assert ulp(g.gelu(x, variant)[near], exact[near], dtype) <= (7 if dtype is torch.float32 else 0.51)


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("variant", VARIANTS)
@needs_cpp
def test_torch_library_accepts_the_operators(variant):
    torch.manual_seed(0)
    x, grad = torch.randn(7, 33, requires_grad=True), torch.randn(7, 33, requires_grad=True)
    bias, ops = torch.randn(33, requires_grad=True), torch.ops.gptscale
    for op, arguments in (
        (ops.gelu, (x, variant)),
        (ops.gelu_backward, (grad, x, variant)),
        (ops.bias_gelu, (x, bias, variant)),
        (ops.bias_gelu_backward, (grad, x, bias, variant)),
    ):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.parametrize("implementation", implementations())
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


@pytest.mark.parametrize("implementation", implementations())
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


@needs_cpp
def test_same_bits_from_run_to_run_and_for_any_number_of_threads():
    torch.manual_seed(0)
    x, bias = torch.randn(3000, 257), torch.randn(257)
    grad = torch.randn_like(x)
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            ops = torch.ops.gptscale
            runs.append([ops.gelu(x, "erf"), *ops.bias_gelu_backward(grad, x, bias, "tanh")])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Return a small C++ program that calls the kernels, with their output in the middle of guarded memory."""
    code = """
    #include "kernels.h"
    #include <cstdio>
    #include <cstring>
    #include <vector>
    using namespace gptscale;
    int main(int, char** argv) {
        Dtype dtype = Dtype(atoi(argv[1]));
        int size = dtype == Dtype::f32 ? 4 : 2, guard = 256;
        for (int n : {0, 1, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 3000}) {
            for (int wide = 0; wide < 2; ++wide) {
                std::vector<char> x(n * size + 1), g(n * size + 1), y(n * size + 2 * guard, 0x5a), gx(y);
                for (int i = 0; i < n; ++i) {
                    float v = (i % 7 - 3) * (wide ? 5.0f : 0.5f);
                    unsigned u;
                    memcpy(&u, &v, 4);
                    unsigned short b = u >> 16;  // as fp16 it is another number, which is good enough
                    memcpy(&x[i * size], size == 4 ? (void*)&v : (void*)&b, size);
                    memcpy(&g[i * size], size == 4 ? (void*)&v : (void*)&b, size);
                }
                std::vector<float> bias(n, 0.25f), sums(n + 128, 1.5f);
                pick(gelu)(Gelu::erf, dtype, x.data(), y.data() + guard, n);
                pick(gelu_backward)(Gelu::tanh, dtype, g.data(), x.data(), gx.data() + guard, n);
                pick(bias_gelu)(Gelu::erf, dtype, x.data(), bias.data(), y.data() + guard, 1, n);
                pick(bias_gelu_backward)(Gelu::sigmoid, dtype, g.data(), x.data(), bias.data(), gx.data() + guard,
                                         sums.data() + 64, 1, n);
                for (auto* v : {&y, &gx})
                    for (int i = 0; i < guard; ++i)
                        if ((*v)[i] != 0x5a || (*v)[v->size() - 1 - i] != 0x5a) return 1;
                for (int i = 0; i < 64; ++i)
                    if (sums[i] != 1.5f || sums[n + 64 + i] != 1.5f) return 2;
            }
        }
        return 0;
    }
    """
    folder = tmp_path_factory.mktemp("guard")
    from gptscale.ops.build.sources import FLAGS, FOLDER

    (folder / "guard.cpp").write_text("#include <cstdlib>\n" + code)
    files = [folder / "guard.cpp", *FOLDER.glob("kernels_*.cpp"), FOLDER / "isa.cpp", FOLDER / "gelu_tables.cpp"]
    program = folder / "guard"
    words = [os.environ.get("CXX", "c++"), *FLAGS, "-O1", f"-I{FOLDER}", *files, "-o", program]
    subprocess.run(list(map(str, words)), check=True, capture_output=True, timeout=400)
    return program


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("dtype", NARROW)
def test_nothing_is_written_outside_the_output(dtype, guarded):
    for isa in ("baseline", "avx2", "avx512"):
        environment = {**os.environ, "GPTSCALE_ISA": isa}
        ended = subprocess.run([guarded, str(NARROW.index(dtype))], env=environment, timeout=120, check=False)
        assert ended.returncode == 0, isa


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(isa):
    code = (
        "import torch; from gptscale.ops import gelu as g; torch.manual_seed(0)\n"
        "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "    x = (torch.randn(5000) * 4).to(dtype)\n"
        "    for v in g.APPROXIMATE:\n"
        "        exact = g.python_gelu(x.double(), v)\n"
        "        eps = torch.finfo(dtype).eps\n"
        "        assert ((g.gelu(x, v, 'cpp') - exact).abs() <= 64 * eps * exact.abs() + torch.finfo(dtype).tiny).all()\n"
        "        back = torch.ops.gptscale.gelu_backward(x, x, v).double() - g.python_gelu_backward(*[x.double()] * 2, v)\n"
        "        assert back.abs().max() <= 8 * eps * x.abs().max()\n"
    )
    environment = {**os.environ, "GPTSCALE_ISA": isa}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=400)


def test_compile_and_export_take_them_whole():
    torch.manual_seed(0)
    x, bias = torch.randn(8, 32, requires_grad=True), torch.randn(32, requires_grad=True)

    class Both(torch.nn.Module):
        def forward(self, x, bias):
            return g.gelu(g.bias_gelu(x, bias, "tanh"), "sigmoid")

    compiled = torch.compile(Both(), fullgraph=True)
    compiled_gradients, eager_gradients = (
        torch.autograd.grad(compiled(x, bias).sum(), (x, bias)),
        torch.autograd.grad(Both()(x, bias).sum(), (x, bias)),
    )
    for a, b in zip(compiled_gradients, eager_gradients, strict=True):
        torch.testing.assert_close(a, b)
    exported = torch.export.export(Both(), (x.detach(), bias.detach()))
    assert [n.target for n in exported.graph.nodes if n.op == "call_function"] == [
        torch.ops.gptscale.bias_gelu.default,
        torch.ops.gptscale.gelu.default,
    ]


def test_autocast_brings_the_bias_to_the_dtype_of_x():
    linear, bias = torch.nn.Linear(16, 16, bias=False), torch.nn.Parameter(torch.randn(16))
    with torch.autocast("cpu", torch.bfloat16):
        y = g.bias_gelu(linear(torch.randn(4, 16)), bias, "tanh")
        assert g.gelu(linear(torch.randn(4, 16)), "tanh").dtype is torch.bfloat16
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert bias.grad.dtype is torch.float32


@pytest.mark.parametrize("implementation", implementations([*IMPLEMENTATIONS, "auto"]))
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: g.gelu([1.0], "erf", i), TypeError, "x: a Tensor expected, not list"),
        (lambda i: g.gelu(torch.arange(3), "erf", i), TypeError, r"x: fp32, .* expected, not torch.int64 \(shape \(3,\)\)"),
        (lambda i: g.gelu(torch.ones(2), "none", i), ValueError, "approximate: erf, tanh or sigmoid expected, not 'none'"),
        (lambda i: g.bias_gelu(torch.ones(2, 3), torch.ones(2), "erf", i), ValueError, r"bias: shape \(3,\) expected"),
        (lambda i: g.bias_gelu(torch.ones(2, 3), torch.ones(1, 3), "erf", i), ValueError, r"bias: shape \(3,\) expected"),
        (lambda i: g.bias_gelu(torch.ones(()), torch.ones(1), "erf", i), ValueError, r"x: shape \(..., n\) expected"),
        (lambda i: g.bias_gelu(torch.ones(2, 3), torch.ones(3).bfloat16(), "erf", i), TypeError, "bias: torch.float32"),
        (lambda i: g.bias_gelu(torch.ones(2, 3), torch.ones(3, device="meta"), "erf", i), ValueError, "bias: on meta"),
        (lambda i: g.gelu(torch.ones(2).to_sparse(), "erf", i), TypeError, "x: a dense tensor expected"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message, implementation):
    with pytest.raises(error, match=message):
        call(implementation)


def test_an_implementation_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="implementation: one of auto, python, cpp, triton expected, not 'cuda'"):
        g.gelu(torch.ones(2), "erf", "cuda")
    with pytest.raises(ValueError, match="implementation: triton needs tensors on a CUDA device, not on cpu"):
        g.gelu(torch.ones(2), "erf", "triton")


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_python_does_the_work(tmp_path):
    code = (
        "import torch; from gptscale.ops.gelu import gelu, bias_gelu\n"
        "x = torch.randn(4, 5, requires_grad=True, dtype=torch.float64); b = torch.randn(5, dtype=torch.float64)\n"
        "assert torch.autograd.gradcheck(lambda v: bias_gelu(gelu(v, 'tanh'), b.requires_grad_(), 'erf'), (x,))\n"
        "assert torch.autograd.gradgradcheck(lambda v: gelu(v, 'sigmoid'), (x,))\n"
        "torch.library.opcheck(torch.ops.gptscale.bias_gelu.default, (x, b, 'erf'))\n"
        "torch.compile(lambda v: gelu(v), fullgraph=True, backend='aot_eager')(x).sum().backward()\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("gptscale:")]
    assert lines == [
        "gptscale: operators run in Python, many times slower: no C++ compiler, for the C++ operators, apt-get install g++"
    ]
    assert not kernels.built_ahead()


@pytest.mark.slow
def test_the_triton_kernels_under_its_interpreter():
    """The kernels need a GPU, but Triton's interpreter runs the same source on CPU tensors, with other rounding."""
    pytest.importorskip("triton")
    code = (
        "import torch; from gptscale.ops import gelu as g, gelu_triton as t; torch.manual_seed(0)\n"
        "for variant in g.APPROXIMATE:\n"
        "    for dtype in (torch.float32, torch.bfloat16):\n"
        "        eps = torch.finfo(dtype).eps\n"
        "        x, grad = (torch.randn(300, 70) * 3).to(dtype), torch.randn(300, 70).to(dtype)\n"
        "        b = torch.randn(70).to(dtype); xd, gd, bd = x.double(), grad.double(), b.double()\n"
        "        close = lambda a, c, f=8: torch.testing.assert_close(a.double(), c, rtol=f * eps, atol=f * eps)\n"
        "        close(t.gelu(x, variant), g.python_gelu(xd, variant))\n"
        "        close(t.gelu_backward(grad, x, variant), g.python_gelu_backward(gd, xd, variant))\n"
        "        close(t.bias_gelu(x, b, variant), g.python_bias_gelu(xd, bd, variant))\n"
        "        gx, gb = t.bias_gelu_backward(grad, x, b, variant)\n"
        "        ex, eb = g.python_bias_gelu_backward(gd, xd, bd, variant)\n"
        "        close(gx, ex); close(gb, eb, 100)\n"
        "odd = torch.tensor([float('nan'), float('inf'), -float('inf'), 0.0])\n"
        "assert t.gelu(odd, 'erf').isnan().tolist() == [True, False, True, False]\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, check=True, timeout=400)


def test_the_triton_kernels_compile_for_a_gpu_that_is_not_here():
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gptscale.ops import gelu_triton as t

    rows = {"rows": "i32", "n": "i32"}
    kernels = {
        t._forward_kernel: {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"},
        t._backward_kernel: {"g_ptr": "*bf16", "x_ptr": "*bf16", "gx_ptr": "*bf16", "n": "i32"},
        t._bias_kernel: {"x_ptr": "*bf16", "b_ptr": "*bf16", "y_ptr": "*bf16", "size": "i32", "n": "i32"},
        t._bias_backward_kernel: {
            **{f"{name}_ptr": "*bf16" for name in ("g", "x", "b", "gx")}, "sums_ptr": "*fp32", **rows
        },
    }  # fmt: skip
    for kernel, types in kernels.items():
        constants = {"VARIANT": 1, "BLOCK": t.BLOCK}
        if kernel is t._bias_backward_kernel:
            constants = {"VARIANT": 1, "ROWS": t.ROWS, "COLUMNS": t.COLUMNS}
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        assert compiled.asm["cubin"]


def test_the_check_of_the_page_runs_as_it_stands(capsys):
    """The exercise's check of loss and gradient, each formula against a reference of its own."""
    page = (Path(__file__).parents[2] / "docs" / "ops" / "gelu_in_lenet.md").read_text()
    (block,) = re.findall(r"(?m)^    import torch\n(?:(?:    .*)?\n)+", page)
    exec(textwrap.dedent(block), {})
    assert len(capsys.readouterr().out.splitlines()) == len(VARIANTS) * 2
