"""The MLP with GELU in the epilogues of its products.

Without a GPU no kernel of cuBLASLt runs. There the operator is tested on a CPU, and the calls of cuBLASLt are read back from
its own descriptors and computed here.
"""

import ctypes
import importlib.util
import re
from contextlib import nullcontext
from ctypes import POINTER, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, cast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.model import cublaslt
from benchmarks.model.fused_mlp import mlp

linear_gelu = torch.ops.gptscale.linear_gelu.default
linear_gelu_backward = torch.ops.gptscale.linear_gelu_backward.default


def reference(x, fc_weight, fc_bias, proj_weight, proj_bias):
    return F.linear(F.gelu(F.linear(x, fc_weight, fc_bias), approximate="tanh"), proj_weight, proj_bias)


def leaves(dtype=torch.float32, device="cpu", rows=(3, 5), h=16, m=32):
    torch.manual_seed(0)
    shapes = (*rows, h), (m, h), (m,), (h, m), (h,)
    return [torch.randn(s, device=device).mul_(0.3).to(dtype).requires_grad_() for s in shapes]


def gradients(function, tensors):
    y = function(*tensors)
    return y, *torch.autograd.grad(y, tensors, torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_is_the_mlp_of_the_model(dtype, compiled):
    """On a CPU, torch's own operations give the same values and gradients, also under the compiler's front end."""
    torch._dynamo.reset()
    function = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (2e-2, 2e-2)
    for result, expected in zip(gradients(function, leaves(dtype)), gradients(reference, leaves(dtype)), strict=True):
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)


def test_gradients_by_differences_and_operators_by_opcheck():
    tensors = leaves(torch.float64)
    assert torch.autograd.gradcheck(mlp, tensors)
    x, weight, bias, proj, _ = (t.detach() for t in tensors)
    _, pre = linear_gelu(x.flatten(0, 1), weight, bias)
    torch.library.opcheck(linear_gelu, (x.flatten(0, 1), weight, bias))
    torch.library.opcheck(linear_gelu_backward, (torch.randn(15, 16, dtype=torch.float64), proj, pre))


def test_arguments_are_named():
    x, fc_weight, fc_bias, proj_weight, proj_bias = leaves()
    for name, wrong in {"fc_bias": fc_bias[1:], "proj_weight": proj_weight.t(), "proj_bias": fc_bias}.items():
        arguments = {"fc_weight": fc_weight, "fc_bias": fc_bias, "proj_weight": proj_weight, "proj_bias": proj_bias}
        with pytest.raises(ValueError, match=name):
            mlp(x, **{**arguments, name: wrong})
    with pytest.raises(TypeError, match="fc_bias"):
        mlp(x, fc_weight, fc_bias.double(), proj_weight, proj_bias)
    with pytest.raises(ValueError, match="a multiple of 8 rows expected, not 31"):
        mlp(x, fc_weight[:31], fc_bias[:31], proj_weight[:, :31], proj_bias)


def test_the_numbers_are_those_of_the_header():
    spec = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    include = Path(next(iter(spec.submodule_search_locations))) / "include" if spec else Path("/")
    if not (include / "cublasLt.h").is_file():
        pytest.skip("no cublasLt.h: torch was installed without CUDA 13's wheels")
    header = "".join((include / name).read_text() for name in ("cublasLt.h", "cublas_api.h", "library_types.h"))
    names = dict(re.findall(r"^\s*(CU[A-Z0-9_]+)\s*=\s*([^,/\n]+)", header, re.M))

    def value(name):
        return eval(re.sub(r"CU[A-Z0-9_]+", lambda match: str(value(match[0])), names[name]))

    assert value("CUBLAS_COMPUTE_32F") == cublaslt.COMPUTE_32F
    assert value("CUDA_R_32F") == cublaslt.R_32F
    assert [value("CUDA_R_16F"), value("CUDA_R_16BF")] == list(cublaslt.TYPES.values())
    assert value("CUBLAS_OP_T") == cublaslt.OP_T
    for prefix, ours in {
        "CUBLASLT_MATMUL_DESC": "TRANSA EPILOGUE BIAS_POINTER",
        "CUBLASLT_MATMUL_DESC_EPILOGUE": "AUX_POINTER AUX_LD",
        "CUBLASLT_EPILOGUE": "GELU_AUX_BIAS DGELU_BGRAD",
        "CUBLASLT_MATMUL_PREF": "MAX_WORKSPACE_BYTES",
    }.items():
        for name in ours.split():
            assert value(f"{prefix}_{name}") == getattr(cublaslt, name)
    assert value("CUBLAS_STATUS_NOT_SUPPORTED") == 15
    fields = re.search(r"typedef struct \{((?:(?!typedef).)*)\} cublasLtMatmulHeuristicResult_t;", header, re.S)[1]
    names_of_fields = re.findall(r"^\s*\w+ (\w+)(?:\[4\])?;", fields, re.M)
    assert names_of_fields == ["algo", "workspaceSize", "state", "wavesCount", "reserved"]


class Described:
    """A stand-in for cuBLASLt that keeps its real descriptors and computes the products here, on CPU tensors."""

    def __init__(self, real):
        self.real, self.calls = real, 0

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cublasLtCreate(self, context):  # noqa: N802
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *args):  # noqa: N802
        cast(args[-1], POINTER(ctypes.c_int))[0] = 1
        return 0

    def of_product(self, desc, attribute, kind):
        value = kind()
        size = c_size_t(ctypes.sizeof(value))
        assert not self.real.cublasLtMatmulDescGetAttribute(desc, attribute, ctypes.byref(value), size, None)
        return value.value

    def matrix(self, pointer, layout):
        """Return the (rows, columns) tensor at a pointer, as a layout describes it."""

        def attribute_of_layout(attribute, kind):
            value = kind()
            size = c_size_t(ctypes.sizeof(value))
            assert not self.real.cublasLtMatrixLayoutGetAttribute(layout, attribute, ctypes.byref(value), size, None)
            return value.value

        rows, columns, stride = (
            attribute_of_layout(a, kind) for a, kind in ((2, c_uint64), (3, c_uint64), (4, c_int64))
        )
        # The number 14 stands for bf16.
        assert attribute_of_layout(0, c_uint32) == 14
        return at(pointer.value, columns * stride).as_strided((rows, columns), (1, stride))

    def cublasLtMatmul(self, handle, desc, *rest):  # noqa: N802
        """Compute D = op(A) B in fp32 and then the epilogue, by columns, as the header defines it."""
        alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, *_ = rest
        assert (cast(alpha, POINTER(c_float))[0], cast(beta, POINTER(c_float))[0]) == (1, 0)
        assert (c.value, c_layout) == (d.value, d_layout)
        self.calls += 1
        epilogue, wide = self.of_product(desc, 7, c_uint32), self.matrix(a, a_layout).float()
        result = (wide.t() if self.of_product(desc, 3, c_int32) else wide) @ self.matrix(b, b_layout).float()
        out = self.matrix(d, d_layout)
        rows, columns = out.shape
        stride = self.of_product(desc, 12, c_int64)
        bias = at(self.of_product(desc, 8, c_void_p), rows)
        pre = at(self.of_product(desc, 11, c_void_p), columns * stride).as_strided((rows, columns), (1, stride))
        if epilogue == 4 | 32 | 128:
            result = result + bias.float()[:, None]
            pre.copy_(result)
            out.copy_(F.gelu(result, approximate="tanh"))
        else:
            assert epilogue == 16 | 64 | 128
            result = torch.ops.aten.gelu_backward(result, pre.float(), approximate="tanh")
            bias.copy_(result.sum(1))
            out.copy_(result)
        return 0


def at(address, numel):
    """Return the bf16 numbers at an address."""
    return torch.frombuffer((ctypes.c_char * (2 * numel)).from_address(address), dtype=torch.bfloat16)


def test_what_cublaslt_is_told_is_the_mlp(monkeypatch):
    """Two shapes, one of them twice, with a weight that is not aligned and one that is not contiguous."""
    try:
        real = cublaslt.library()
    except OSError:
        pytest.skip("no libcublasLt: a torch without CUDA")
    stand_in = Described(real)
    monkeypatch.setattr(cublaslt, "library", lambda: stand_in)
    monkeypatch.setattr(cublaslt, "stream_of", lambda device: nullcontext(0))
    cublaslt.handle.cache_clear()
    cublaslt.product.cache_clear()
    for rows, h, m in ((7, 16, 32), (12, 24, 8), (7, 16, 32)):
        x, fc_weight, fc_bias, proj_weight, _ = (t.detach() for t in leaves(torch.bfloat16, rows=(rows,), h=h, m=m))
        grad = torch.randn(rows, h).bfloat16()
        y, pre = cublaslt.linear_gelu(x, torch.cat([fc_weight[:1], fc_weight])[1:], fc_bias)
        to_pre, to_bias = cublaslt.linear_gelu_backward(grad, proj_weight.t().contiguous().t(), pre)
        for result, expected in zip((y, pre), linear_gelu(x, fc_weight, fc_bias), strict=True):
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-2)
        for result, expected in zip((to_pre, to_bias), linear_gelu_backward(grad, proj_weight, pre), strict=True):
            torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert stand_in.calls == 6
    assert cublaslt.product.cache_info().currsize == 4
    cublaslt.handle.cache_clear()
    cublaslt.product.cache_clear()


def test_a_status_is_an_error(monkeypatch):
    class Refuses:
        def cublasLtCreate(self, context):  # noqa: N802
            return 15

    monkeypatch.setattr(cublaslt, "library", Refuses)
    with pytest.raises(RuntimeError, match=r"cublasLtCreate: status 15 \(not supported\)"):
        cublaslt.call("cublasLtCreate", None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    tensors = leaves(dtype, "cuda", (4, 128), 320, 1280)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    eager = gradients(reference, tensors)
    for result, by_torch, exact in zip(gradients(mlp, tensors), eager, gradients(reference, wide), strict=True):
        error, of_torch = ((t.double() - exact).abs().max() / exact.abs().max() for t in (result, by_torch))
        assert error <= 2 * of_torch + 1e-3
