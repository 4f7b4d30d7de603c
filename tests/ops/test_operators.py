"""The kernels of all operators: what they touch, their bits, lesser instruction sets, no compiler, and Triton's."""

import importlib
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from operators import compiled_for_hopper, needs_cpp, run_code

from gptscale.ops import conv, gelu, max_pool, registry
from gptscale.ops.build import kernels
from gptscale.ops.build.sources import FLAGS, FOLDER

ISAS = ["baseline", "avx2", "avx512"]
GUARDS = Path(__file__).parent / "guards"


@pytest.fixture(scope="module")
def checked_kernels(tmp_path_factory):
    """The compiler's words, and the objects of each instruction set, compiled once with the address sanitizer.

    Without optimization every access of the source is there to be checked, and the compiler needs a quarter of the time.
    """
    folder = tmp_path_factory.mktemp("kernels")
    words = [os.environ.get("CXX", "c++"), *FLAGS, "-O0", "-fsanitize=address", f"-I{FOLDER}"]
    objects = [folder / f"{isa}.o" for isa in ISAS]
    for isa, target in zip(ISAS, objects, strict=True):
        command = [*words, "-c", str(FOLDER / f"kernels_{isa}.cpp"), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True, timeout=400)
    return [*words, *map(str, objects), str(FOLDER / "isa.cpp"), str(FOLDER / "gelu_tables.cpp")]


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("guard", ["conv", "gelu", "max_pool"])
def test_nothing_is_touched_outside_the_tensors(guard, checked_kernels, tmp_path):
    program = tmp_path / guard
    command = [*checked_kernels, str(GUARDS / f"{guard}.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=400)
    for isa in ISAS:
        environment = {**os.environ, "GPTSCALE_ISA": isa}
        ended = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert ended.returncode == 0, f"{isa}: {ended.returncode} {ended.stderr[:2000]}"


def layout(last):
    return torch.channels_last if last else torch.contiguous_format


def conv_bits(last, size):
    """Return a call of this package's kernels: few channels, the weight's gradient, the mask, the bias's gradient."""
    x, weight, bias = torch.randn(size), torch.randn(9, size[1], 3, 3), torch.randn(9)
    y = conv.conv_bias_relu_forward(x, weight, bias)
    y = y.to(memory_format=torch.channels_last) if last else y
    grad, needs = torch.randn_like(y), (False, True, True)

    def compute():
        back = conv.conv_bias_relu_backward(grad, y, x, weight, needs=needs)
        return conv.conv_bias_relu_forward(x, weight, bias), back[1], back[2]

    return compute


def gelu_bits(last, size):
    x, bias, grad, ops = torch.randn(size), torch.randn(size[-1]), torch.randn(size), torch.ops.gptscale
    return lambda: (ops.gelu(x, "erf"), *ops.bias_gelu_backward(grad, x, bias, "tanh"))


def max_pool_bits(last, size):
    x = torch.randn(size).to(memory_format=layout(last))
    geometry = (3, 3), (1, 1), (1, 1), (1, 1)

    def compute():
        y, offsets = torch.ops.gptscale.max_pool2d(x, *geometry, False)
        return y, offsets, torch.ops.gptscale.max_pool2d_backward(y, offsets, x.shape, *geometry)

    return compute


@needs_cpp
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("prepare", "size"),
    [
        *((conv_bits, size) for size in ((5, 3, 40, 50), (1, 1, 200, 64))),
        (gelu_bits, (3000, 257)),
        *((max_pool_bits, size) for size in ((8, 30, 40, 56), (1, 2, 300, 400), (200, 3, 14, 14))),
    ],
)
def test_same_bits_from_run_to_run_and_for_any_number_of_threads(prepare, size, last):
    torch.manual_seed(0)
    compute, before, runs = prepare(last, size), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            runs.append(compute())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.slow
@needs_cpp
@pytest.mark.parametrize("isa", ISAS[:2])
def test_lesser_instruction_sets_compute_the_same(isa):
    """A kernel is chosen once in a process, so that the tests of values run again in one of their own."""
    values = "test_values or nothing_was or no_larger or wide_rows or bias_gelu_is"
    words = ["-q", "-p", "no:cacheprovider", "-k", f"({values}) and not python and not loop and not windows"]
    files = [str(Path(__file__).parent / f"test_{name}.py") for name in ("conv", "gelu", "max_pool")]
    run_code(f"import pytest, sys; sys.exit(pytest.main({words + files!r}))", GPTSCALE_ISA=isa)


def conv_twice(x, weight, bias):
    return conv.conv_bias_relu(conv.conv_bias_relu(x, weight, bias, padding=1)[:, :3], weight, bias, stride=2)


def gelu_twice(x, bias):
    return gelu.gelu(gelu.bias_gelu(x, bias, "tanh"), "sigmoid")


def max_pool_twice(x):
    return max_pool.max_pool2d(max_pool.max_pool2d(x, 3, 2, 1), 2)


TWICE = {
    conv_twice: ([(2, 3, 20, 20), (8, 3, 3, 3), (8,)], ["conv_bias_relu", "conv_bias_relu"]),
    gelu_twice: ([(8, 32), (32,)], ["bias_gelu", "gelu"]),
    max_pool_twice: ([(2, 3, 12, 16)], ["max_pool2d", "max_pool2d"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("twice", TWICE)
def test_compile_and_export_take_an_operator_whole(twice):
    """For GELU with the code that torch generates, for the others as torch traces them."""
    torch.manual_seed(0)
    (first, *others), called = TWICE[twice]

    class Twice(torch.nn.Module):
        def forward(self, *leaves):
            return twice(*leaves)

    backend = "inductor" if twice is gelu_twice else "aot_eager"
    compiled = torch.compile(Twice(), fullgraph=True, backend=backend, dynamic=True)
    for batch in (first[0], first[0] + 1):
        leaves = [torch.randn(size, requires_grad=True) for size in ((batch, *first[1:]), *others)]
        found, expected = (torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled, Twice()))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    exported = torch.export.export(Twice(), tuple(leaf.detach() for leaf in leaves))
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    ours = [target for target in targets if "gptscale" in str(target)]
    assert ours == [getattr(torch.ops.gptscale, name).default for name in called]


def leaf(size, *, last=False):
    return torch.randn(size).to(memory_format=layout(last)).requires_grad_()


def conv_calls(ops):
    first, grouped = ([1, 1], [2, 2], [1, 1], 1), ([2, 1], [1, 0], [1, 2], 2)
    for x, w, geometry, last in (
        ((1, 1, 28, 28), (6, 1, 5, 5), first, False),
        ((1, 6, 12, 10), (4, 3, 3, 2), grouped, True),
    ):
        leaves = leaf(x, last=last), leaf(w), leaf(w[:1])
        yield ops.conv_bias_relu, (*leaves, *geometry)
        y = ops.conv_bias_relu(*leaves, *geometry).detach()
        needs = [not last, True, True]
        yield ops.conv_bias_relu_backward, (leaf(y.shape), y, *leaves[:2], *geometry, needs)


def gelu_calls(ops):
    x, grad, bias = leaf((7, 33)), leaf((7, 33)), leaf(33)
    yield ops.gelu, (x, "erf")
    yield ops.gelu_backward, (grad, x, "tanh")
    yield ops.bias_gelu, (x, bias, "sigmoid")
    yield ops.bias_gelu_backward, (grad, x, bias, "erf")


def max_pool_calls(ops):
    geometry = ([3, 2], [2, 1], [1, 1], [1, 2])
    for x in (leaf((2, 3, 8, 9)), leaf((2, 3, 8, 9), last=True), leaf((3, 8, 9))):
        yield ops.max_pool2d, (x, *geometry, True)
        y, offsets = ops.max_pool2d(x, *geometry, True)
        yield ops.max_pool2d_backward, (leaf(y.shape), offsets, list(x.shape), *geometry)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [conv_calls, gelu_calls, max_pool_calls])
def test_torch_library_accepts_the_operators(calls):
    """Their gradients too. They run in Python where nothing is compiled."""
    registry.ready()
    torch.manual_seed(0)
    for op, arguments in calls(torch.ops.gptscale):
        torch.library.opcheck(op.default, arguments)


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_python_does_the_work(tmp_path):
    """The tests of autocast and of torch's registry pass in a process that finds no compiler."""
    words = ["-q", "-s", "-p", "no:cacheprovider", "-k", "torch_library or autocast", str(Path(__file__).parent)]
    code = f"import pytest, sys; sys.exit(pytest.main({words!r}))"
    said = run_code(code, XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path), CXX="no-such-compiler")
    reason = "no C++ compiler, for the C++ operators, apt-get install g++"
    lines = [line for line in said.splitlines() if line.startswith("gptscale:")]
    assert lines == [f"gptscale: operators run in Python, many times slower: {reason}"]
    assert not kernels.built_ahead()


def conv_cases(count):
    draw, cases = random.Random(0).randint, []
    for n in range(count):
        groups, last = draw(1, 2), draw(0, 1) == 1
        kernel, stride, dilation, padding = ((draw(a, b), draw(a, b)) for a, b in ((1, 3), (1, 2), (1, 2), (0, 2)))
        x = (2, groups * draw(1, 3), draw(6, 9), draw(6, 9))
        cases.append((x, (groups * draw(1, 3), x[1] // groups, *kernel), (stride, padding, dilation, groups), last, n))
    return cases


INTERPRETED = {
    "conv_bias_relu": (
        f"CASES = {conv_cases(12)!r}\n"
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
        "for last, images, channels in ((False, 3, 6), (True, 1, 150)):\n"
        "    y = torch.randn(images, channels, 9, 31).bfloat16(); g = torch.randint(-4, 5, y.shape).bfloat16()\n"
        "    y = y.to(memory_format=torch.channels_last) if last else y; y[0, 0, 0, 0] = float('nan')\n"
        "    masked, sums = t.mask_and_sum(g, y); exact = torch.where(y <= 0, 0, g)\n"
        "    assert torch.equal(masked, exact) and torch.equal(sums, exact.sum((0, 2, 3)))\n"
        "x, w, one = torch.tensor([[[[float('nan'), 1.0]]]]), torch.ones(1, 1, 1, 1), (1, 1)\n"
        "y = t.conv_bias_relu(x, w, torch.ones(1), one, (0, 0), one, 1)\n"
        "assert y.isnan().tolist() == [[[[True, False]]]]\n"
    ),
    "gelu": (
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
    ),
    "max_pool": (
        "import random, torch; from gptscale.ops import max_pool_python as p, max_pool_triton as t\n"
        "M = type('M', (), {'max_pool2d': p.python_max_pool2d, 'max_pool2d_backward': p.python_max_pool2d_backward})\n"
        "draw = random.Random(0).randint; torch.manual_seed(0)\n"
        "for n in range(30):\n"
        "    k, s, d = ((draw(1, 3), draw(1, 3)) for _ in range(3)); p = tuple(draw(0, v // 2) for v in k)\n"
        "    c, dtype = bool(draw(0, 1)), (torch.float32, torch.float16)[n % 2]\n"
        "    x = torch.randint(-3, 3, (2, 3, draw(7, 10), draw(7, 10))).to(dtype)\n"
        "    x[torch.rand(x.shape) < 0.1] = (float('nan'), -float('inf'))[n // 2 % 2]\n"
        "    x = x.to(memory_format=torch.channels_last) if draw(0, 1) else x[0] if draw(0, 1) else x\n"
        "    (y, o), (Y, O) = (f.max_pool2d(x, k, s, p, d, c) for f in (t, M))\n"
        "    assert torch.equal(y.nan_to_num(9), Y.nan_to_num(9)) and torch.equal(o, O) and y.stride() == Y.stride()\n"
        "    g = torch.randn(y.shape).to(dtype)\n"
        "    b, B = (f.max_pool2d_backward(g, o, x.shape, k, s, p, d) for f in (t, M))\n"
        "    assert torch.equal(b, B) and b.stride() == B.stride()\n"
        "assert t.max_pool2d(torch.empty(0, 2, 4, 4), (2, 2), (2, 2), (0, 0), (1, 1), False)[0].shape == (0, 2, 2, 2)\n"
    ),
}


@pytest.mark.slow
def test_the_triton_kernels_under_its_interpreter():
    """The kernels need a GPU, but Triton's interpreter runs the same source on CPU tensors, with other rounding."""
    pytest.importorskip("triton")
    run_code("".join(INTERPRETED.values()), TRITON_INTERPRET="1")


def test_a_gpu_gets_fp64_by_torchs_own_operations():
    on_gpu, x = registry._on_cuda("no_such_module", "gelu", gelu.python_gelu), torch.randn(5, dtype=torch.float64)
    assert torch.equal(on_gpu(x, "erf"), gelu.python_gelu(x, "erf"))
    with pytest.raises(ModuleNotFoundError):
        on_gpu(x.float(), "erf")


def conv_kernels(t):
    blocks = {"BLOCK_M": t.BLOCK_M, "BLOCK_N": t.BLOCK_N, "BLOCK_K": t.BLOCK_K, "PRECISION": "tf32", "IN_CHANNELS": 64}
    pairs = {"KERNEL": 3, "STRIDE": 1, "PADDING": 1, "DILATION": 1}
    forward = {**blocks, **{f"{name}_{axis}": n for name, n in pairs.items() for axis in "HW"}}
    mask = {"OVER_ROWS": True, "ROWS": t.ROWS, "COLUMNS": t.COLUMNS, "STEPS": t.STEPS}
    return [(t._forward_kernel, forward, {}, 4), (t._mask_kernel, mask, {}, 4)]


def gelu_kernels(t):
    one = {"VARIANT": 1, "BLOCK": t.BLOCK}
    yield from ((kernel, one, {}, 8) for kernel in (t._forward_kernel, t._backward_kernel, t._bias_kernel))
    yield t._bias_backward_kernel, {"VARIANT": 1, "ROWS": t.ROWS, "COLUMNS": t.COLUMNS}, {}, 8


def max_pool_kernels(t):
    constants = {**t.constants((3, 3), (2, 2), (1, 1), (1, 1)), "BLOCK": t.BLOCK}
    size = {"size": "i64", "offsets_ptr": "*i8"}
    return [(kernel, constants, size, 4) for kernel in (t._forward_kernel, t._backward_kernel)]


@pytest.mark.parametrize(
    ("name", "kernels_of"), [("conv", conv_kernels), ("gelu", gelu_kernels), ("max_pool", max_pool_kernels)]
)
def test_the_triton_kernels_compile_for_a_gpu_that_is_not_here(name, kernels_of):
    pytest.importorskip("triton")
    module = importlib.import_module(f"gptscale.ops.{name}_triton")
    for kernel, constants, special, warps in kernels_of(module):
        types = {n: "*bf16" if n.endswith("_ptr") else "i32" for n in kernel.arg_names if n not in constants}
        types |= {n: kind for n, kind in {"sums_ptr": "*fp32", **special}.items() if n in types}
        assembly = compiled_for_hopper(kernel, types, constants, num_warps=warps)
        assert (name, kernel.__name__) != ("conv", "_forward_kernel") or "wgmma" in assembly["ptx"]
