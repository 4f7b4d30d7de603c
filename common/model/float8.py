"""Matrix products in float8 for the Linears of a block.

Two formats, as in Micikevicius et al. 2022 (arXiv 2209.05433): e4m3 (3 bits of mantissa, up to 448) for activations and weights,
which need precision, and e5m2 (2 bits, up to 57344) for gradients of outputs, which need range. Sums are fp32 and outputs bf16.
The gradient of a weight, which the optimizer reads, has the type of the weight.

Each tensor has one scale, computed anew every time it is cast: the largest number of the format divided by the largest entry of
the tensor. It is computed in fp32 on the device, so the host does not wait. It is not rounded to a power of two, because that
would gain nothing and lose range. A float is equally precise at any scale: multiplying by the scale rounds by 2^-24, the format
by 2^-4 or 2^-3. Rounding the scale down would leave up to half of the range empty, and at its lower end more entries would
become zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run import Run

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# On CUDA every length that torch._scaled_mm is given must be a multiple of this.
TILE = 16
# The smallest value that a tensor's largest entry counts as. For zeros and numbers next to zero, the scale or its inverse would
# otherwise leave the range of fp32.
AMAX_MIN = 2.0**-100


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor, (), fp32, that makes `x` fill the range of `dtype`.

    A NaN in `x` makes it NaN, an Inf makes it 0.
    """
    return torch.finfo(dtype).max / x.abs().amax().float().clamp(min=AMAX_MIN)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` times `scale` in `dtype`.

    Nothing finite is clipped. An Inf in `x` becomes NaN, since it has made the scale 0.
    """
    return (x.float() * scale).to(dtype)


def product(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Return a (m, k) times the transpose of b (n, k), plus bias (n), as (m, n) in `out_dtype`.

    a and b are float8, cast with `scale_a` and `scale_b`. Both are read along k, so an operand that is given transposed is
    copied, at one byte per entry. use_fast_accum: as in torch._scaled_mm.
    """
    inverses = scale_a.reciprocal(), scale_b.reciprocal()
    bias = None if bias is None else bias.to(torch.bfloat16)
    if a.device.type == "cpu":
        y: Tensor = emulated_product(a, inverses[0], b, inverses[1], bias, out_dtype)
        return y
    operands = a.contiguous(), b.contiguous().t()
    return torch._scaled_mm(*operands, *inverses, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum)


@torch.library.custom_op(
    "gptscale::float8_product",
    mutates_args=(),
    device_types="cpu",
    schema="(Tensor a, Tensor inverse_a, Tensor b, Tensor inverse_b, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
def emulated_product(
    a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Compute `product` on a CPU by an fp32 product of the float8 numbers.

    It is an operator of its own so that no compiler removes a rounding. torch._scaled_mm is not used, because its kernel for a
    CPU depends on the processor: with AMX it is the reference loop of oneDNN, which is 2000 times slower than this and whose
    scales leave the range of fp32 (torch 2.11).
    """
    y = (a.float() * inverse_a) @ (b.float() * inverse_b).t()
    return (y if bias is None else y + bias).to(out_dtype)


@emulated_product.register_fake
def _shape(
    a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


@functools.cache
def _register_flops() -> None:
    """Tell FlopCounterMode of torch what `emulated_product` costs."""
    # Imported here because it imports Triton.
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula(torch.ops.gptscale.float8_product)
    def flops(a: torch.Size, inverse_a: torch.Size, b: torch.Size, *rest: Any, **options: Any) -> int:
        return 2 * a[0] * a[1] * b[0]


OPERATORS = torch.ops.aten._scaled_mm.default, torch.ops.gptscale.float8_product.default


class Float8Product(torch.autograd.Function):
    """The product of x (rows, k) and the transpose of weight (n, k), plus bias (n), in bf16: (rows, n).

    Backward needs the cast activations, one byte each, and the weight itself. The weight is not kept in float8: it is in memory
    anyway, or, if it is sharded, it is gathered again, while a cast copy would stay unsharded on every device. So the weight is
    cast in forward and, with the same scale, once more in backward, for every micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x_scale, w_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        x8, w8 = cast(x, x_scale, E4M3), cast(weight, w_scale, E4M3)
        ctx.save_for_backward(x8, x_scale, weight, w_scale)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        # The fast accumulation of Hopper adds in fewer bits. That is enough for outputs that are rounded to the 8 bits of bf16,
        # and not enough for gradients.
        return product(x8, x_scale, w8, w_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        x8, x_scale, weight, w_scale = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        g_scale = scale_of(grad, E5M2)
        g8, w8 = cast(grad, g_scale, E5M2), cast(weight, w_scale, E4M3)
        grad_x = product(g8, g_scale, w8.t(), w_scale, out_dtype=torch.bfloat16)
        grad_w = product(g8.t(), g_scale, x8.t(), x_scale, out_dtype=weight.dtype)
        grad_bias = None if bias_dtype is None else grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x.to(x_dtype), grad_w, grad_bias


class Float8Linear(nn.Linear):
    """A Linear that computes its product and both products of its backward in float8, with the same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in bf16 as under autocast."""
        # Under autocast the fp32 product of a CPU would round its sums to bf16.
        with torch.autocast(x.device.type, enabled=False):
            rows = Float8Product.apply(x.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        y: Tensor = rows.unflatten(0, x.shape[:-1])
        return y


def apply_float8(blocks: Iterable[nn.Module]) -> None:
    """Turn every Linear of `blocks` into a Float8Linear in place.

    Parameter names stay as they are. Call it before activation checkpointing and compilation, which wrap the forward that a block
    has by then. Without compilation, each cast and each search for the largest entry is a pass over memory of its own, and these
    passes take back what the products gain.
    """
    _register_flops()
    for block in blocks:
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = Float8Linear


def check_shapes(run: Run) -> None:
    """Raise ConfigError if a run in fp8 has a hidden size, or rows of a micro-batch, that are no multiple of `TILE`."""
    if run.gpt.n_embd % TILE:
        what = f"n_embd {run.gpt.n_embd} is no multiple of {TILE}, as fp8 wants it"
        raise ConfigError(what, "in --precision", f"use --n-embd {-(-run.gpt.n_embd // TILE) * TILE}, or bf16")
    micro, fits = run.batch.micro_batch_size, TILE // math.gcd(TILE, run.seq_len)
    if micro % fits:
        what = f"micro_batch_size {micro} x seq_len {run.seq_len} rows are no multiple of {TILE}, as fp8 wants it"
        raise ConfigError(what, "in --precision", f"use a --micro-batch-size that {fits} divides, or bf16")
