"""The products of a block's four Linears in float8, each tensor with one scale that is found anew every time.

Micikevicius et al. 2022 (arXiv 2209.05433): e4m3 (3 bits of mantissa, up to 448) for activations and weights, which want
precision, e5m2 (2 bits, up to 57344) for gradients of outputs, which want range. Sums are fp32, outputs bf16, and what
the optimizer sees, the gradient of the weight, has the weight's own type.

A scale is the format's largest number over the tensor's largest, in fp32, on the device: the host waits for nothing. It is
no power of two: a float is as precise at any scale, so rounding the scale down would gain nothing (its own product rounds by
2^-24, the format by 2^-4 or 2^-3) and leave up to half of the range empty, at whose lower end entries become zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from gptscale.common.errors import ConfigError

if TYPE_CHECKING:
    from gptscale.common.settings.run import Run

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 16  # every length that torch._scaled_mm sees must be a multiple of it on CUDA
AMAX_MIN = 2.0**-100  # for zeros and what is next to them: neither the scale nor its inverse may leave fp32


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What `x` must be multiplied by to fill the range of `dtype`, (), fp32. NaN and Inf in `x` make it NaN or 0."""
    return torch.finfo(dtype).max / x.abs().amax().float().clamp(min=AMAX_MIN)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` times `scale` in `dtype`. Nothing finite is clipped, and Inf times the scale of 0 that it has made is NaN."""
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
    """a (m, k) times the transpose of b (n, k), both cast with their scales, plus bias (n), in `out_dtype`: (m, n).

    Both are read along k, so that a transposed operand costs a copy of one byte per entry.
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
    """`product` by fp32's, of what the casts have left. An operator, so that no compiler takes a rounding out.

    Not torch._scaled_mm, whose kernel for a CPU depends on the processor: with AMX it is oneDNN's reference loop, 2000 times
    slower than this, and its scales leave the range of fp32 (torch 2.11).
    """
    y = (a.float() * inverse_a) @ (b.float() * inverse_b).t()
    return (y if bias is None else y + bias).to(out_dtype)


@emulated_product.register_fake
def _shape(
    a: Tensor, inverse_a: Tensor, b: Tensor, inverse_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(len(a), len(b), dtype=dtype)


@register_flop_formula(torch.ops.gptscale.float8_product)
def _flops(a: torch.Size, inverse_a: torch.Size, b: torch.Size, *rest: Any, **options: Any) -> int:
    """Of the product, from the shapes of its arguments."""
    return 2 * a[0] * a[1] * b[0]


OPERATORS = torch.ops.aten._scaled_mm.default, torch.ops.gptscale.float8_product.default


class Float8Product(torch.autograd.Function):
    """x (rows, k) times the transpose of weight (n, k), plus bias (n), in bf16: (rows, n).

    Kept for backward are the cast activations, a byte each, and the weight itself, which is there anyway (or, sharded, is
    gathered again: a cast copy would stay whole on every device). It is cast once per forward, by the same scale once
    more in backward, and so again for every micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x_scale, w_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        x8, w8 = cast(x, x_scale, E4M3), cast(weight, w_scale, E4M3)
        ctx.save_for_backward(x8, x_scale, weight, w_scale)
        ctx.dtypes = x.dtype, bias.dtype
        # Hopper's fast accumulation adds in fewer bits: good enough for outputs that are rounded to 8, not for gradients
        return product(x8, x_scale, w8, w_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x8, x_scale, weight, w_scale = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        g_scale = scale_of(grad, E5M2)
        g8, w8 = cast(grad, g_scale, E5M2), cast(weight, w_scale, E4M3)
        grad_x = product(g8, g_scale, w8.t(), w_scale, out_dtype=torch.bfloat16)
        grad_w = product(g8.t(), g_scale, x8.t(), x_scale, out_dtype=weight.dtype)
        return grad_x.to(x_dtype), grad_w, grad.sum(0, dtype=torch.float32).to(bias_dtype)


class Float8Linear(nn.Linear):
    """A Linear whose three products are float8's; its parameters are those of the Linear that it was."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), bf16 as under autocast."""
        with torch.autocast(x.device.type, enabled=False):  # else a CPU's kernel rounds its sums to bf16 on the way
            rows = Float8Product.apply(x.flatten(0, -2), self.weight, self.bias)  # type: ignore[no-untyped-call]
        y: Tensor = rows.unflatten(0, x.shape[:-1])
        return y


def apply_float8(blocks: Iterable[nn.Module]) -> None:
    """Make every Linear of `blocks` (attn.qkv, attn.proj, mlp.fc, mlp.proj) a Float8Linear in place, names and all.

    Before checkpointing and compilation, which wrap what a block's forward is by then. Without compilation casts and
    searches for the largest entry are passes over memory of their own, and take back what the products gain.
    """
    for block in blocks:
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = Float8Linear


def emulation(run: Run) -> list[str]:
    """What must be said of a run in fp8 on a CPU, a line; nothing of any other."""
    emulated = run.config.precision == "fp8" and run.world.device.type == "cpu"
    return ["fp8      emulated by the CPU: right, and slow; no time of this run says anything of fp8"] * emulated


def check_shapes(run: Run) -> None:
    """ConfigError if a run in fp8 has a length that is no multiple of `TILE`: hidden size, or rows of a micro-batch."""
    if run.config.precision != "fp8":
        return
    if run.gpt.n_embd % TILE:
        raise ConfigError(
            f"n_embd {run.gpt.n_embd} is no multiple of {TILE}, as fp8 wants it",
            "in --precision",
            f"use --n-embd {-(-run.gpt.n_embd // TILE) * TILE}, or bf16",
        )
    micro, fits = run.batch.micro_batch_size, TILE // math.gcd(TILE, run.seq_len)
    if micro % fits:
        raise ConfigError(
            f"micro_batch_size {micro} x seq_len {run.seq_len} rows are no multiple of {TILE}, as fp8 wants it",
            "in --precision",
            f"use a --micro-batch-size that {fits} divides, or bf16",
        )
