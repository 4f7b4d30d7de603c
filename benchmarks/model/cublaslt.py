"""The two matrix products of cuBLASLt for an MLP with GELU, called by ctypes because torch offers neither for training.

    forward     y = gelu_tanh(x W^T + b), and x W^T + b beside it for the backward         (epilogue GELU_AUX_BIAS)
    backward    d pre = (dz V) gelu_tanh'(pre), and its sum over rows, the gradient of b   (epilogue DGELU_BGRAD)

torch._addmm_activation does not keep x W^T + b. pytorch#169470 would have kept it, but was closed.

cuBLASLt stores matrices by columns. To it, a row-major (rows, n) tensor is an n x rows matrix with leading dimension n. So
both products compute D (m x rows) from A, the weight, and B, which is x or dz (k x rows). The constants and their meaning
are those of cublasLt.h. A test compares them with that header.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor

# cublasComputeType_t, cudaDataType_t, cublasOperation_t
COMPUTE_32F, R_32F, OP_T = 68, 0, 1
# cudaDataType_t
TYPES = {torch.float16: 2, torch.bfloat16: 14}
# cublasLtMatmulDescAttributes_t
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 7, 8, 11, 12
# cublasLtEpilogue_t
GELU_AUX_BIAS, DGELU_BGRAD = 164, 208
# cublasLtMatmulPreferenceAttributes_t
MAX_WORKSPACE_BYTES = 1
# bytes, as NVIDIA advises for Hopper
WORKSPACE = 32 * 2**20
# bytes. By default the choice of a kernel assumes this alignment of pointers.
ALIGNMENT = 256
# the leading dimension of `pre` must be a multiple of it, in elements
MULTIPLE = 8


class Heuristic(ctypes.Structure):
    """The struct cublasLtMatmulHeuristicResult_t: a kernel, and the workspace that it needs."""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@cache
def library() -> ctypes.CDLL:
    """Return the library that torch has loaded, or raise OSError where there is none."""
    process = ctypes.CDLL(None)
    # A library preloaded in its place is seen here only.
    if hasattr(process, "cublasLtCreate"):
        return process
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


def call(name: str, *args: Any) -> None:
    """Call a function of the library, and raise RuntimeError with its status (cublasStatus_t) if that is not 0."""
    status = getattr(library(), name)(*args)
    if status:
        raise RuntimeError(f"{name}: status {status}" + (" (not supported)" if status == 15 else ""))


@cache
def handle(device: torch.device) -> c_void_p:
    """Return the library's context on a device, which must be the current one."""
    context = c_void_p()
    call("cublasLtCreate", byref(context))
    return context


@contextmanager
def stream_of(device: torch.device) -> Iterator[int]:
    """Make `device` the current one for a while, and yield its stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream().cuda_stream


class EpilogueProduct:
    """A matrix product with one epilogue at one shape: its descriptors and the chosen kernel.

    It is kept until the process ends, because a run has few shapes.
    """

    def __init__(self, epilogue: int, m: int, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.desc, self.device, self.lock = c_void_p(), device, threading.Lock()
        self.algo: Heuristic | None = None
        call("cublasLtMatmulDescCreate", byref(self.desc), c_int(COMPUTE_32F), c_int(R_32F))
        self.set(EPILOGUE, c_uint32(epilogue))
        self.set(AUX_LD, c_int64(m))
        # In the forward product the weight is (m, k), by columns k x m. In the backward product it is (k, m).
        if epilogue == GELU_AUX_BIAS:
            self.set(TRANSA, c_int32(OP_T))
        a = layout(dtype, k, m) if epilogue == GELU_AUX_BIAS else layout(dtype, m, k)
        d = layout(dtype, m, rows)
        self.layouts = a, layout(dtype, k, rows), d, d

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product."""
        call("cublasLtMatmulDescSetAttribute", self.desc, c_int(attribute), byref(value), c_size_t(sizeof(value)))

    def choose(self) -> Heuristic:
        """Return the kernel that the library expects to be fastest, or raise RuntimeError if there is none."""
        preference, heuristic, count = c_void_p(), Heuristic(), c_int()
        call("cublasLtMatmulPreferenceCreate", byref(preference))
        size = c_size_t(WORKSPACE)
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            c_int(MAX_WORKSPACE_BYTES),
            byref(size),
            c_size_t(sizeof(size)),
        )
        args = (handle(self.device), self.desc, *self.layouts, preference, c_int(1), byref(heuristic), byref(count))
        call("cublasLtMatmulAlgoGetHeuristic", *args)
        call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value:
            raise RuntimeError("cublasLtMatmulAlgoGetHeuristic: no kernel for this shape")
        return heuristic

    def __call__(self, weight: Tensor, x: Tensor, bias: Tensor, pre: Tensor, out: Tensor) -> None:
        """Enqueue the product on the current stream.

        The epilogue decides whether bias and pre are read or written.
        """
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        one, zero = c_float(1), c_float(0)
        # The pointers are set in the shared descriptor, so only one thread at a time may be here.
        with self.lock, stream_of(self.device) as stream:
            self.set(BIAS_POINTER, c_void_p(bias.data_ptr()))
            self.set(AUX_POINTER, c_void_p(pre.data_ptr()))
            self.algo = self.algo or self.choose()
            a, b, c, d = self.layouts
            weight_at, x_at, out_at = (c_void_p(t.data_ptr()) for t in (weight, x, out))
            call(
                "cublasLtMatmul",
                *(handle(self.device), self.desc, byref(one), weight_at, a, x_at, b, byref(zero), out_at, c, out_at, d),
                *(byref(self.algo.algo), c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE), c_void_p(stream)),
            )


def layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Return the layout of a dense column-major matrix."""
    descriptor = c_void_p()
    sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
    call("cublasLtMatrixLayoutCreate", byref(descriptor), c_int(TYPES[dtype]), *sizes)
    return descriptor


product = cache(EpilogueProduct)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu_tanh(x weight^T + bias), (rows, m), and the argument of GELU, in the same shape.

    x: (rows, k). weight: (m, k). bias: (m,).
    """
    (rows, k), m = x.shape, weight.shape[0]
    y, pre = x.new_empty(rows, m), x.new_empty(rows, m)
    product(GELU_AUX_BIAS, m, rows, k, x.dtype, x.device)(aligned(weight), aligned(x), bias.contiguous(), pre, y)
    return y, pre


def linear_gelu_backward(grad: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad weight) gelu_tanh'(pre), (rows, m), and its sum over rows, (m,).

    grad: (rows, k). weight: (k, m). pre: (rows, m).
    """
    (rows, k), m = grad.shape, weight.shape[1]
    to_pre, to_bias = torch.empty_like(pre), pre.new_empty(m)
    product(DGELU_BGRAD, m, rows, k, grad.dtype, grad.device)(aligned(weight), aligned(grad), to_bias, pre, to_pre)
    return to_pre, to_bias


def aligned(tensor: Tensor) -> Tensor:
    """Return the same values, contiguous and at an address with the alignment that the kernels assume."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
