"""The MLP with GELU in the epilogues of its products.

Without a GPU no kernel of cuBLASLt runs. There the operator is tested on a CPU, and the calls of cuBLASLt are read back from
its own descriptors and computed here.
"""

import importlib.util
import re
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    tensors = leaves(dtype, "cuda", (4, 128), 320, 1280)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    eager = gradients(reference, tensors)
    for result, by_torch, exact in zip(gradients(mlp, tensors), eager, gradients(reference, wide), strict=True):
        error, of_torch = ((t.double() - exact).abs().max() / exact.abs().max() for t in (result, by_torch))
        assert error <= 2 * of_torch + 1e-3
