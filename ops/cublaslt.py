"""cuBLASLt's two matrix products for an MLP with GELU, called by ctypes: torch gives neither of them to training.

    forward     y = gelu_tanh(x W^T + b), and x W^T + b beside it for the backward         (epilogue GELU_AUX_BIAS)
    backward    d pre = (dz V) gelu_tanh'(pre), and its sum over rows, the gradient of b   (epilogue DGELU_BGRAD)

torch._addmm_activation keeps no x W^T + b (pytorch#169470 would have; it was closed). cuBLASLt thinks in columns: a row-major
(rows, n) tensor is its n x rows matrix with leading dimension n, so both products make D (m x rows) of A, the weight, and
B, x or dz (k x rows). Numbers and semantics are those of cublasLt.h, which a test reads.
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

COMPUTE_32F, R_32F, OP_T = 68, 0, 1  # cublasComputeType_t, cudaDataType_t, cublasOperation_t
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
TRANSA, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 3, 7, 8, 11, 12  # cublasLtMatmulDescAttributes_t
GELU_AUX_BIAS, DGELU_BGRAD = 164, 208  # cublasLtEpilogue_t
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 * 2**20  # what NVIDIA advises for Hopper
ALIGNMENT = 256  # bytes; what the choice of a kernel assumes of pointers unless told
MULTIPLE = 8  # of the leading dimension of `pre`, in elements


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: a kernel, and what it needs."""

    _fields_ = [
        ("algo", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@cache
def library() -> ctypes.CDLL:
    """The library that torch has loaded; OSError where there is none."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


def call(name: str, *args: Any) -> None:
    """A function of the library; RuntimeError with the status (cublasStatus_t) if it is not 0."""
    status = getattr(library(), name)(*args)
    if status:
        raise RuntimeError(f"{name}: status {status}" + " (not supported)" * (status == 15))


@cache
def handle(device: torch.device) -> c_void_p:
    """The library's context on a device, which is the current one."""
    made = c_void_p()
    call("cublasLtCreate", byref(made))
    return made


@contextmanager
def stream_of(device: torch.device) -> Iterator[int]:
    """With `device` as the current one: its stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream().cuda_stream


class Product:
    """One epilogue at one shape: descriptors and the kernel chosen. Kept for good: a run has few shapes."""

    def __init__(self, epilogue: int, m: int, rows: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.desc, self.device, self.lock = c_void_p(), device, threading.Lock()
        self.algo: Heuristic | None = None
        call("cublasLtMatmulDescCreate", byref(self.desc), c_int(COMPUTE_32F), c_int(R_32F))
        self.set(EPILOGUE, c_uint32(epilogue))
        self.set(AUX_LD, c_int64(m))
        if epilogue == GELU_AUX_BIAS:  # the weight lies as (m, k), in columns k x m; in the backward as (k, m)
            self.set(TRANSA, c_int32(OP_T))
        a = layout(dtype, k, m) if epilogue == GELU_AUX_BIAS else layout(dtype, m, k)
        d = layout(dtype, m, rows)
        self.layouts = a, layout(dtype, k, rows), d, d

    def set(self, attribute: int, value: Any) -> None:
        """An attribute of the product."""
        call("cublasLtMatmulDescSetAttribute", self.desc, c_int(attribute), byref(value), c_size_t(sizeof(value)))

    def choose(self) -> Heuristic:
        """The kernel that the library thinks fastest for these pointers' alignment; RuntimeError if it has none."""
        preference, found, count = c_void_p(), Heuristic(), c_int()
        call("cublasLtMatmulPreferenceCreate", byref(preference))
        size = c_size_t(WORKSPACE)
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            c_int(MAX_WORKSPACE_BYTES),
            byref(size),
            c_size_t(sizeof(size)),
        )
        args = (handle(self.device), self.desc, *self.layouts, preference, c_int(1), byref(found), byref(count))
        call("cublasLtMatmulAlgoGetHeuristic", *args)
        call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value:
            raise RuntimeError("cublasLtMatmulAlgoGetHeuristic: no kernel for this shape")
        return found

    def __call__(self, weight: Tensor, x: Tensor, bias: Tensor, pre: Tensor, out: Tensor) -> None:
        """Enqueue the product on the current stream. bias and pre are read or written, as the epilogue says."""
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=x.device)
        one, zero = c_float(1), c_float(0)
        with self.lock, stream_of(self.device) as stream:  # pointers are set in the descriptor: one call at a time
            self.set(BIAS_POINTER, c_void_p(bias.data_ptr()))
            self.set(AUX_POINTER, c_void_p(pre.data_ptr()))
            self.algo = self.algo or self.choose()
            a, b, c, d = self.layouts
            at = [c_void_p(t.data_ptr()) for t in (weight, x, out)]
            call(
                "cublasLtMatmul",
                *(handle(self.device), self.desc, byref(one), at[0], a, at[1], b, byref(zero), at[2], c, at[2], d),
                *(byref(self.algo.algo), c_void_p(workspace.data_ptr()), c_size_t(WORKSPACE), c_void_p(stream)),
            )


def layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Of a dense column-major matrix."""
    made = c_void_p()
    call(
        "cublasLtMatrixLayoutCreate", byref(made), c_int(TYPES[dtype]), c_uint64(rows), c_uint64(columns), c_int64(rows)
    )
    return made


product = cache(Product)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu_tanh(x weight^T + bias) (rows, m) and what stands in the brackets, of x (rows, k), weight (m, k), bias (m)."""
    (rows, k), m = x.shape, weight.shape[0]
    y, pre = x.new_empty(rows, m), x.new_empty(rows, m)
    product(GELU_AUX_BIAS, m, rows, k, x.dtype, x.device)(aligned(weight), aligned(x), bias.contiguous(), pre, y)
    return y, pre


def linear_gelu_backward(grad: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """(grad weight) gelu_tanh'(pre) (rows, m) and its sum over rows, of grad (rows, k), weight (k, m), pre (rows, m)."""
    (rows, k), m = grad.shape, weight.shape[1]
    to_pre, to_bias = torch.empty_like(pre), pre.new_empty(m)
    product(DGELU_BGRAD, m, rows, k, grad.dtype, grad.device)(aligned(weight), aligned(grad), to_bias, pre, to_pre)
    return to_pre, to_bias


def aligned(tensor: Tensor) -> Tensor:
    """The same values where the kernels may load them."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
