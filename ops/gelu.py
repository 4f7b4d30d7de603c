"""GELU in three variants, and bias + GELU in one pass.

    f(x) = x P(x)        f'(x) = P(x) + x P'(x)        f''(x) = 2 P'(x) + x P''(x)

    erf      P(x) = Phi(x) = erfc(-x / sqrt 2) / 2, the normal distribution     (PyTorch: F.gelu(x), approximate="none")
    tanh     P(x) = s(2 sqrt(2/pi) (x + 0.044715 x^3)), s(z) = 1/(1 + exp(-z))  (PyTorch: F.gelu(x, approximate="tanh"))
    sigmoid  P(x) = s(1.702 x)                                                  (in PyTorch by hand: x * sigmoid(1.702 x))

The source is Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415), section 2. The three are different
functions: sigmoid differs from erf by up to 0.0203, tanh by up to 0.00048. docs/ops/gelu.md has the derivation, the kernels and
measured figures.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from gptscale.ops import registry
from gptscale.ops.arguments import check_like, check_shape, check_tensor

Approximate = Literal["erf", "tanh", "sigmoid"]
APPROXIMATE = ("erf", "tanh", "sigmoid")

K0 = 2 * math.sqrt(2 / math.pi)
K1 = 0.044715 * K0
K_SIGMOID = 1.702


def gelu(x: Tensor, approximate: Approximate = "erf", implementation: str = "auto") -> Tensor:
    """Return x P(x) elementwise, in x's shape, dtype and memory layout.

    It can be differentiated twice.

    approximate: which P. implementation: auto takes C++ on a CPU and Triton on a GPU, while python, cpp and triton demand
    that one. Raises TypeError or ValueError that names the argument.
    """
    check_tensor("x", x)
    _check_approximate(approximate)
    result: Tensor = registry.chosen("gelu", implementation, x.device)(x, approximate)
    return result


def bias_gelu(x: Tensor, bias: Tensor, approximate: Approximate = "erf", implementation: str = "auto") -> Tensor:
    """Return gelu(x + bias) in one pass over x (..., n), with bias (n,).

    The sum is not rounded to x's dtype in between.
    """
    check_tensor("x", x)
    check_like("bias", bias, "x", x)
    if x.dim() == 0:
        raise ValueError("x: shape (..., n) expected, not ()")
    check_shape("bias", bias, (x.shape[-1],), f"the last of x's {tuple(x.shape)}")
    _check_approximate(approximate)
    result: Tensor = registry.chosen("bias_gelu", implementation, x.device)(x, bias, approximate)
    return result


def _check_approximate(approximate: str) -> None:
    if approximate not in APPROXIMATE:
        raise ValueError(f"approximate: erf, tanh or sigmoid expected, not {approximate!r}")


# --- In Python: the formulas


def p(x: Tensor, approximate: str) -> Tensor:
    """Return P(x)."""
    # erfc and not 1 + erf, which would subtract nearly equal numbers for x < 0.
    if approximate == "erf":
        return 0.5 * torch.erfc(x * -math.sqrt(0.5))
    return torch.sigmoid(x * (K0 + K1 * x * x) if approximate == "tanh" else K_SIGMOID * x)


def p_prime(x: Tensor, approximate: str) -> Tensor:
    """Return P'(x)."""
    if approximate == "erf":
        return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    s = p(x, approximate)
    return s * (1 - s) * (K0 + 3 * K1 * x * x if approximate == "tanh" else K_SIGMOID)


def p_second(x: Tensor, approximate: str) -> Tensor:
    """Return P''(x)."""
    if approximate == "erf":
        return -x * p_prime(x, approximate)
    s = p(x, approximate)
    slope = K0 + 3 * K1 * x * x if approximate == "tanh" else K_SIGMOID
    curvature = 6 * K1 * x if approximate == "tanh" else 0.0
    return s * (1 - s) * ((1 - 2 * s) * slope * slope + curvature)


def _wide(x: Tensor) -> Tensor:
    """Return x in the type that the formulas are computed in, which is float for the half precisions."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def python_gelu(x: Tensor, approximate: str) -> Tensor:
    """Return f(x) by torch's own operations."""
    wide = _wide(x)
    return (wide * p(wide, approximate)).to(x.dtype)


def python_gelu_backward(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Return grad f'(x)."""
    wide = _wide(x)
    return (_wide(grad) * (p(wide, approximate) + wide * p_prime(wide, approximate))).to(x.dtype)


def python_gelu_double_backward(upstream: Tensor, grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Return upstream grad f''(x), the gradient that goes back to x through `python_gelu_backward`."""
    wide = _wide(x)
    second = 2 * p_prime(wide, approximate) + wide * p_second(wide, approximate)
    return (_wide(upstream) * _wide(grad) * second).to(x.dtype)


def python_bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """Return f(x + bias)."""
    return python_gelu(_wide(x) + _wide(bias), approximate).to(x.dtype)


def python_bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return grad f'(x + bias), and its sum over rows."""
    to_x = python_gelu_backward(_wide(grad), _wide(x) + _wide(bias), approximate)
    return to_x.to(x.dtype), to_x.reshape(-1, bias.numel()).sum(0).to(bias.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.approximate = inputs
    ctx.save_for_backward(*tensors)


# --- Registration with torch.library


def _fake_rows(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_rows_backward(grad: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), bias.new_empty(bias.shape)


def _gelu_formula(named: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return named("gelu_backward")(grad, x, ctx.approximate), None


def _gelu_backward_formula(named: Any, ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    grad, x = ctx.saved_tensors
    to_grad = named("gelu_backward")(upstream, x, ctx.approximate)
    return to_grad, python_gelu_double_backward(upstream, grad, x, ctx.approximate), None


def _bias_gelu_formula(named: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*named("bias_gelu_backward")(grad, *ctx.saved_tensors, ctx.approximate), None)


def _bias_gelu_backward_formula(named: Any, ctx: Any, upstream_x: Tensor, upstream_bias: Tensor) -> tuple[Any, ...]:
    grad, x, bias = ctx.saved_tensors
    upstream, at = upstream_x + upstream_bias, x + bias
    to_x = python_gelu_double_backward(upstream, grad, at, ctx.approximate)
    to_grad = named("gelu_backward")(upstream, at, ctx.approximate)
    return to_grad, to_x, to_x.reshape(-1, bias.numel()).sum(0), None


registry.define(
    "gelu(Tensor x, str approximate) -> Tensor",
    fake=lambda x, approximate: torch.empty_like(x),
    python={"python": lambda x, approximate: torch.empty_like(x).copy_(python_gelu(x, approximate))},
    cuda="gptscale.ops.gelu_triton",
    setup_context=_save,
    backward=_gelu_formula,
)
registry.define(
    "gelu_backward(Tensor grad, Tensor x, str approximate) -> Tensor",
    fake=lambda grad, x, approximate: torch.empty_like(x),
    python={"python": lambda grad, x, a: torch.empty_like(x).copy_(python_gelu_backward(grad, x, a))},
    cuda="gptscale.ops.gelu_triton",
    setup_context=_save,
    backward=_gelu_backward_formula,
)
registry.define(
    "bias_gelu(Tensor x, Tensor bias, str approximate) -> Tensor",
    fake=_fake_rows,
    python={"python": lambda x, bias, approximate: python_bias_gelu(x.contiguous(), bias, approximate)},
    cuda="gptscale.ops.gelu_triton",
    setup_context=_save,
    backward=_bias_gelu_formula,
    autocast=lambda dtype, x, bias, approximate: (x, bias.to(x.dtype), approximate),
)
registry.define(
    "bias_gelu_backward(Tensor grad, Tensor x, Tensor bias, str approximate) -> (Tensor, Tensor)",
    fake=_fake_rows_backward,
    python={"python": lambda grad, x, bias, a: python_bias_gelu_backward(grad, x.contiguous(), bias, a)},
    cuda="gptscale.ops.gelu_triton",
    setup_context=_save,
    backward=_bias_gelu_backward_formula,
)
