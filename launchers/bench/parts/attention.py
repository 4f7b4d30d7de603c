"""Attention for `gptscale bench parts`: every kernel, with heads as they are and padded wherever they could be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from gptscale.common.model.attention import BACKENDS
from gptscale.common.model.gpt import causal_attention
from gptscale.launchers.bench.parts.ways import StepPart, StepShape, differentiated


def attention(shape: StepShape, heads: int) -> StepPart:
    """Return attention with `heads` heads, as they are and padded, by every kernel that could run here.

    It goes from the projection's output to the next one's input, so that copies count. The ways called `wide` are as if the
    projections themselves had padded heads, which costs matrix products that are not in here.
    """
    gpt = shape.gpt
    head_dim = gpt.n_embd // heads
    qkv = shape.normal(shape.batch_size, gpt.block_size, heads, 3, head_dim).requires_grad_()
    grad = shape.normal(shape.batch_size, gpt.block_size, gpt.n_embd)
    ways = []
    for name in (*kernels(shape), "math"):
        ways.append(differentiated(f"{name}, as is", partial(by_kernel, name, causal_attention), [qkv], grad))
    for to in sorted({head_dim + -head_dim % m for m in (8, 64)} - {head_dim}):
        wide = F.pad(qkv.detach(), (0, to - head_dim)).requires_grad_()
        grad_wide = F.pad(grad.unflatten(2, (heads, head_dim)), (0, to - head_dim)).flatten(2)
        padding = partial(causal_attention, multiple=to)
        scaled = partial(wide_attention, scale=1 / math.sqrt(head_dim))
        for name in kernels(shape):
            ways.append(differentiated(f"{name}, padded to {to}", partial(by_kernel, name, padding), [qkv], grad))
        if shape.compiled:
            compiled = torch.compile(padding, fullgraph=True, dynamic=False)
            ways.append(differentiated(f"auto, padded to {to}, compiled", compiled, [qkv], grad))
        for name in kernels(shape):
            way = differentiated(f"{name}, {to} wide", partial(by_kernel, name, scaled), [wide], grad_wide)
            ways.append(way._replace(result=partial(cut, way.run, heads, head_dim)))
    moved = (4 + 8) * shape.rows * gpt.n_embd * shape.dtype.itemsize
    return StepPart(f"attention {heads} x {head_dim}", moved, 6.0 * shape.rows * gpt.n_embd * gpt.block_size, ways)


def wide_attention(qkv: Tensor, scale: float) -> Tensor:
    """Return attention as causal_attention does, of heads that the caller has padded, and keep their padding.

    qkv: (batch, seq, heads, 3, padded head_dim). Returns (batch, seq, heads x padded head_dim).
    """
    q, k, v = qkv.permute(3, 0, 2, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).flatten(2)


def cut(run: Callable[[], Sequence[Tensor]], heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Run `wide_attention` and its backward, and return output and gradient without the padding."""
    y, grad = run()
    return y.unflatten(2, (heads, -1))[..., :head_dim].flatten(2), grad[..., :head_dim]


def by_kernel(name: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call `function` with attention by the kernel called `name`."""
    with sdpa_kernel(BACKENDS[name]) if name != "auto" else nullcontext():
        return function(*inputs)


def kernels(shape: StepShape) -> list[str]:
    """Return the fused kernels of attention that could run here.

    A kernel itself refuses a shape that it does not take.
    """
    return ["auto"] if shape.device.type == "cpu" else ["auto", "flash", "cudnn", "efficient"]
