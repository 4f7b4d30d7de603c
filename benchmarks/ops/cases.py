"""What `python -m benchmarks.ops` compares: an operator of ours and PyTorch's, the same mathematics on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.ops.conv import conv_bias_relu
from gptscale.ops.gelu import APPROXIMATE, bias_gelu, gelu
from gptscale.ops.max_pool import max_pool2d_backward, max_pool2d_with_offsets

OPERATORS = ("gelu", "bias_gelu", "max_pool2d", "conv_bias_relu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KIB = 2**10
# 1 KiB to 256 MiB
SIZES_KIB = [4**k for k in range(10)]
BIAS_COLUMNS = 2048


class OperatorCase(NamedTuple):
    """One comparison: `ours` against `torchs`, the same mathematics by PyTorch.

    bytes: what both move at least. bar: how many times faster than PyTorch's ours must be, above 64 KiB. memory_bound: then ours
    must also reach 80 % of the copy bandwidth. flops: its multiplications and additions, where these are what bounds it.
    """

    operator: str
    what: str
    dtype: str
    size: int
    bytes: int
    ours: Callable[[], Any]
    torchs: Callable[[], Any]
    bar: float
    memory_bound: bool
    flops: int = 0


def cases(
    operators: Sequence[str], dtypes: Sequence[str], largest_kib: int, spread: float, device: torch.device
) -> Iterator[OperatorCase]:
    """Yield the comparisons asked for, one at a time, because the largest would not fit in memory together."""
    for dtype in dtypes:
        for kib in (k for k in SIZES_KIB if k <= largest_kib):
            if "gelu" in operators:
                yield from gelu_cases(kib * KIB, dtype, spread, device)
            if "bias_gelu" in operators:
                yield from bias_gelu_cases(kib * KIB, dtype, spread, device)
    if "max_pool2d" in operators:
        yield from max_pool_cases(dtypes, device)
    if "conv_bias_relu" in operators:
        yield from conv_cases(dtypes, device)


def torchs_gelu(x: Tensor, variant: str) -> Tensor:
    """Return PyTorch's own GELU of `x`.

    For sigmoid, which has no operator there, it is F.gelu, the fastest that a user would take instead.
    """
    return F.gelu(x, approximate="tanh" if variant == "tanh" else "none")


def torchs_gelu_backward(grad: Tensor, x: Tensor, variant: str) -> Tensor:
    """Return the gradient of `torchs_gelu`."""
    input_grad: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if variant == "tanh" else "none")
    return input_grad


def gelu_cases(size: int, dtype: str, spread: float, device: torch.device) -> Iterator[OperatorCase]:
    """Yield each variant of GELU, forward and backward."""
    x = (torch.randn(size // DTYPES[dtype].itemsize, device=device) * spread).to(DTYPES[dtype])
    grad = torch.randn_like(x)
    ours = torch.ops.gptscale.gelu_backward
    for v in APPROXIMATE:
        forward = (lambda v=v: gelu(x, v)), (lambda v=v: torchs_gelu(x, v))
        yield OperatorCase("gelu", f"{v} forward", dtype, size, 2 * size, *forward, 1.0, True)
        backward = (lambda v=v: ours(grad, x, v)), (lambda v=v: torchs_gelu_backward(grad, x, v))
        yield OperatorCase("gelu", f"{v} backward", dtype, size, 3 * size, *backward, 1.0, True)


def bias_gelu_cases(size: int, dtype: str, spread: float, device: torch.device) -> Iterator[OperatorCase]:
    """Yield the fused operator against adding and then GELU.

    Backward includes the bias gradient, against that of GELU and a sum.
    """
    columns = min(BIAS_COLUMNS, size // DTYPES[dtype].itemsize)
    x = (torch.randn(size // DTYPES[dtype].itemsize, device=device) * spread).to(DTYPES[dtype]).view(-1, columns)
    grad, bias = torch.randn_like(x), torch.randn(columns, device=device).to(DTYPES[dtype])
    # what the eager form has kept for backward
    summed = x + bias
    ours = torch.ops.gptscale.bias_gelu_backward
    for v in ("erf", "tanh"):
        forward = (lambda v=v: bias_gelu(x, bias, v)), (lambda v=v: torchs_gelu(x + bias, v))
        yield OperatorCase("bias_gelu", f"{v} forward", dtype, size, 2 * size, *forward, 1.3, True)
        backward = (lambda v=v: ours(grad, x, bias, v)), (lambda v=v: torchs_gelu_backward(grad, summed, v).sum(0))
        yield OperatorCase("bias_gelu", f"{v} backward", dtype, size, 3 * size, *backward, 1.3, True)


# (batch, channels, height, width), as in LeNet, in a CIFAR net, in ResNet's stem, and a large one
POOLED = ((32, 6, 28, 28), (32, 64, 32, 32), (8, 64, 112, 112), (32, 64, 112, 112))
# size, stride, padding
WINDOWS = ((2, 2, 0), (3, 2, 1), (3, 1, 1))


def max_pool_cases(dtypes: Sequence[str], device: torch.device) -> Iterator[OperatorCase]:
    """Yield forward and backward of max pooling.

    PyTorch's keep 8 bytes for each window, the place of its maximum. Ours keep 1.
    """
    aten = torch.ops.aten
    for dtype in dtypes:
        for shape in POOLED:
            for layout in (torch.contiguous_format, torch.channels_last):
                for size, stride, padding in WINDOWS:
                    x = torch.randn(shape, device=device).to(DTYPES[dtype]).to(memory_format=layout)
                    geometry = (size, size), (stride, stride), (padding, padding), (1, 1)
                    y, offsets = max_pool2d_with_offsets(x, *geometry)
                    _, indices = aten.max_pool2d_with_indices(x, *geometry)
                    grad = torch.randn_like(y)
                    what = f"{size}x{size}/{stride} {'NHWC' if layout is torch.channels_last else 'NCHW'}"
                    moved = x.nbytes + y.nbytes + offsets.nbytes
                    forward = (
                        partial(max_pool2d_with_offsets, x, *geometry),
                        partial(aten.max_pool2d_with_indices, x, *geometry),
                    )
                    yield OperatorCase("max_pool2d", f"{what} forward", dtype, x.nbytes, moved, *forward, 1.0, False)
                    backward = (
                        partial(max_pool2d_backward, grad, offsets, x.shape, *geometry),
                        partial(aten.max_pool2d_with_indices_backward, grad, x, *geometry, False, indices),
                    )
                    yield OperatorCase("max_pool2d", f"{what} backward", dtype, x.nbytes, moved, *backward, 1.0, False)


# (batch, in, size, out, kernel, stride, padding, groups): LeNet's two, a CIFAR net's, a strided, a depthwise
CONVOLVED = (
    (32, 1, 28, 6, 5, 1, 2, 1),
    (32, 6, 14, 16, 5, 1, 0, 1),
    (32, 3, 32, 64, 3, 1, 1, 1),
    (32, 64, 32, 64, 3, 1, 1, 1),
    (8, 64, 56, 128, 3, 2, 1, 1),
    (8, 64, 56, 64, 3, 1, 1, 64),
)


def conv_cases(dtypes: Sequence[str], device: torch.device) -> Iterator[OperatorCase]:
    """Yield forward, and forward with backward, against F.relu(F.conv2d(...))."""
    for dtype in dtypes:
        for batch, channels, size, out, kernel, stride, padding, groups in CONVOLVED:
            x = torch.randn(batch, channels, size, size, device=device).to(DTYPES[dtype]).requires_grad_()
            weight = torch.randn(out, channels // groups, kernel, kernel, device=device).mul_(0.1).to(DTYPES[dtype])
            weight.requires_grad_()
            bias = torch.randn(out, device=device).to(DTYPES[dtype]).requires_grad_()
            eager = partial(F.conv2d, x, weight, bias, stride, padding, 1, groups)
            ours = partial(conv_bias_relu, x, weight, bias, stride, padding, 1, groups)
            both = partial(_both, ours, (x, weight, bias)), partial(_both, partial(_relu, eager), (x, weight, bias))
            forward = torch.no_grad()(ours), torch.no_grad()(partial(_relu, eager))
            what = f"{channels}x{size}x{size} to {out}, {kernel}x{kernel}/{stride}"
            if groups > 1:
                what += f", {groups} groups"
            y = forward[0]()
            moved = x.nbytes + weight.nbytes + bias.nbytes + y.nbytes
            flops = 2 * y.numel() * weight[0].numel()
            yield OperatorCase("conv_bias_relu", f"{what} forward", dtype, x.nbytes, moved, *forward, 1.0, False, flops)
            yield OperatorCase(
                "conv_bias_relu", f"{what} both", dtype, x.nbytes, 3 * moved, *both, 1.0, False, 3 * flops
            )
            if channels <= 3:
                # In a first layer nobody asks for the gradient of the images.
                leaves = (weight, bias)
                first = partial(_both, ours, leaves), partial(_both, partial(_relu, eager), leaves)
                x.requires_grad_(False)
                name = f"{what} first-layer both"
                yield OperatorCase("conv_bias_relu", name, dtype, x.nbytes, 2 * moved, *first, 1.0, False, 2 * flops)


def _relu(convolved: Callable[[], Tensor]) -> Tensor:
    return F.relu(convolved())


def _both(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y = forward()
    return torch.autograd.grad(y, leaves, torch.ones_like(y))
