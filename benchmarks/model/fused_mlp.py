"""A GPT's MLP, proj(gelu_tanh(fc(x))), as one operator that computes the GELU inside the matrix products.

On its own, GELU moves 8h numbers per token in the forward pass (4h read, 4h written) and 12h in the backward pass, and the
gradient of fc's bias moves 4h more. The epilogue of a product has its numbers still in registers. There, 4h and 4h are left:
the forward pass writes the input of GELU next to its result, and the backward pass reads it. For `1.6b` in bf16 this saves
0.57 us per token at 4.3 TB/s, if the products are as fast as before.

On CUDA in 16 bits cuBLASLt computes them (cublaslt.py). On a CPU the same operators run by torch's own operations, so
that the code around the kernels is tested there. docs/ops/mlp.md says what is known about the speed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model import cublaslt
from gptscale.ops import registry
from gptscale.ops.arguments import check_like, check_shape, check_tensor


def mlp(x: Tensor, fc_weight: Tensor, fc_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor) -> Tensor:
    """Return proj(gelu_tanh(fc(x))) of shape (..., h), which can be differentiated once.

    x: (..., h). fc_weight: (m, h), with m a multiple of 8. fc_bias: (m,). proj_weight: (h, m). proj_bias: (h,). On CUDA they
    must be bf16 or fp16. Raises TypeError or ValueError that names the argument, and RuntimeError if the library has no
    kernel for the shape.
    """
    check_tensor("x", x)
    h, m = x.shape[-1], fc_weight.shape[0]
    shapes = {"fc_weight": (m, h), "fc_bias": (m,), "proj_weight": (h, m), "proj_bias": (h,)}
    for (name, shape), value in zip(shapes.items(), (fc_weight, fc_bias, proj_weight, proj_bias), strict=True):
        check_like(name, value, "x", x)
        check_shape(name, value, shape, f"for x {tuple(x.shape)} and {m} inside")
    if x.device.type == "cuda" and x.dtype not in cublaslt.TYPES:
        raise TypeError(f"x: bf16 or fp16 expected on CUDA, not {x.dtype}")
    if m % cublaslt.MULTIPLE:
        raise ValueError(f"fc_weight: a multiple of {cublaslt.MULTIPLE} rows expected, not {m}")
    rows = x.reshape(-1, h)
    y: Tensor = MLPFunction.apply(rows, fc_weight, fc_bias, proj_weight, proj_bias)  # type: ignore[no-untyped-call]
    return y.view(x.shape)


def python_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return gelu_tanh(x weight^T + bias), and the argument of GELU."""
    pre = F.linear(x, weight, bias)
    return F.gelu(pre, approximate="tanh"), pre


def python_linear_gelu_backward(grad: Tensor, weight: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad weight) gelu_tanh'(pre), and its sum over rows."""
    to_pre: Tensor = torch.ops.aten.gelu_backward(grad @ weight, pre, approximate="tanh")
    return to_pre, to_pre.sum(0)


registry.define(
    "linear_gelu(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)",
    fake=lambda x, weight, bias: (x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))),
    python=python_linear_gelu,
    cuda="benchmarks.model.cublaslt",
    cpp=False,
)
registry.define(
    "linear_gelu_backward(Tensor grad, Tensor weight, Tensor pre) -> (Tensor, Tensor)",
    fake=lambda grad, weight, pre: (torch.empty_like(pre), pre.new_empty(pre.shape[1])),
    python=python_linear_gelu_backward,
    cuda="benchmarks.model.cublaslt",
    cpp=False,
)


class MLPFunction(torch.autograd.Function):
    """The MLP of x (rows, h): the two operators, and the four matrix products that need no epilogue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        fc_weight, fc_bias, proj_weight, proj_bias = weights
        y, pre = torch.ops.gptscale.linear_gelu(x, fc_weight, fc_bias)
        ctx.save_for_backward(x, fc_weight, proj_weight, y, pre)
        return F.linear(y, proj_weight, proj_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, fc_weight, proj_weight, y, pre = ctx.saved_tensors
        to_pre, to_fc_bias = torch.ops.gptscale.linear_gelu_backward(grad, proj_weight, pre)
        return to_pre @ fc_weight, to_pre.t() @ x, to_fc_bias, grad.t() @ y, grad.sum(0)
