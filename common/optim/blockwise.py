"""Block-wise 8-bit quantisation with a dynamic code: one byte per number and one fp32 scale per block of 256.

A number x of a block with largest magnitude a is stored as the nearest of 256 values to x / a (Dettmers et al. 2021,
arXiv 2110.02861). The values lie densely near 1 and reach down to 1e-6 or so: seven decades, each with half as many values as the
decade above it. Quantising what was dequantised gives the same bytes and scales, so state passes through fp32 unharmed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
DECADES = 7
# Blocks below this are zero: smaller products of scale and value would leave fp32's normal numbers and not come back.
SMALLEST = 2.0**-100


class Code(NamedTuple):
    """256 values in order, and how the nearest is found: by the upper 16 bits of a number, then one comparison.

    values: (256,), from -1 or 0 to 1. bounds: (256,), where each value gives way to the next; infinity after the last.
    cells: (65536,) uint8, for each pattern of upper bits the value of the smallest number that has it.
    """

    values: Tensor
    bounds: Tensor
    cells: Tensor


def dynamic_code(signed: bool, device: torch.device) -> Code:
    """The paper's map for numbers of either sign, or for numbers that are never negative and have twice as many values.

    Two changes. The value nearest to -1 is -1, so that the number that gave the scale is exact whatever its sign. And without
    a sign nothing above 0 becomes 0: a second moment of 0 would leave AdamW's eps alone in the denominator.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - DECADES)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    values.sort()
    if signed:
        values[0] = -1.0
    exact = torch.tensor(values, dtype=torch.float64)
    bounds = torch.cat([(exact[:-1] + exact[1:]) / 2, torch.tensor([torch.inf])]).float()
    if not signed:
        bounds[0] = 0.0
    patterns = torch.arange(2**16, dtype=torch.int64)
    ends = [((patterns << 16) + low).to(torch.int32).view(torch.float32) for low in (0, 2**16 - 1)]
    code = Code(exact.float(), bounds, torch.searchsorted(bounds, torch.minimum(*ends)).clamp(max=255).to(torch.uint8))
    return Code(*(table.to(device) for table in code))


def quantise(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Bytes (n, 256) and scales (n, 1) of fp32 `x` (n, 256): no value is nearer to x / scale than the one taken."""
    absmax = x.abs().amax(1, keepdim=True)
    absmax = torch.where(absmax < SMALLEST, 0.0, absmax)
    unit = torch.where(absmax > 0, x / absmax, 0.0)
    index = _look_up(code.cells, (unit.view(torch.int32) >> 16) & 0xFFFF).int()
    return (index + (unit > _look_up(code.bounds, index))).to(torch.uint8), absmax


def dequantise(codes: Tensor, absmax: Tensor, code: Code) -> Tensor:
    """The fp32 numbers (n, 256) that `codes` (n, 256) with scales `absmax` (n, 1) stand for."""
    return _look_up(code.values, codes.int()) * absmax


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """table[index], which takes three times as long on a CPU."""
    return table.index_select(0, index.view(-1)).view(index.shape)
