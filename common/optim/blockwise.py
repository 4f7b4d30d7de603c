"""Block-wise 8-bit quantisation with a dynamic code: one byte per number and one fp32 scale per block of 256.

The scale of a block is its largest magnitude a. A number x of the block is stored as the nearest of 256 values to x / a (Dettmers
et al. 2021, arXiv 2110.02861). The values lie densely near 1 and reach down to about 1e-6: seven decades, each with half as many
values as the decade above it. Numbers that were dequantised are quantised to the same bytes and scales again, so optimizer state
can be converted to fp32 and back without loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
DECADES = 7
# A block whose largest magnitude is below this is stored as zeros. Its products of scale and value would be too small for the
# normal numbers of fp32, and would not be quantised to the same bytes again.
SMALLEST = 2.0**-100


class Code(NamedTuple):
    """The 256 values that a byte can stand for, and two tables to find the nearest value to a number.

    The upper 16 bits of the number select a cell, then one comparison decides between its value and the next one.

    values: (256,), in ascending order, from -1 or 0 to 1.
    bounds: (256,), the number at which each value gives way to the next, and infinity for the last.
    cells: (65536,) uint8, for each pattern of upper bits the value of the smallest number that has it.
    """

    values: Tensor
    bounds: Tensor
    cells: Tensor


def dynamic_code(signed: bool, device: torch.device) -> Code:
    """Return the dynamic code of the paper, for numbers of either sign or for numbers that are never negative.

    The unsigned code has twice as many positive values. Two things differ from the paper. In the signed code the value nearest to
    -1 is -1 itself, so that the number that gave the scale is exact whatever its sign. In the unsigned code no number above 0
    becomes 0, because a second moment of 0 would leave only eps in the denominator of AdamW.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        n_values = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, n_values + 1, dtype=torch.float64)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade + 1 - DECADES)).tolist()
        values += means
        if signed:
            values += [-mean for mean in means]
    values.sort()
    if signed:
        values[0] = -1.0
    exact = torch.tensor(values, dtype=torch.float64)
    bounds = torch.cat([(exact[:-1] + exact[1:]) / 2, torch.tensor([torch.inf])]).float()
    if not signed:
        bounds[0] = 0.0
    patterns = torch.arange(2**16, dtype=torch.int64)
    # The two numbers at the ends of each cell: all lower bits 0, and all lower bits 1.
    ends = [((patterns << 16) + low_bits).to(torch.int32).view(torch.float32) for low_bits in (0, 2**16 - 1)]
    cells = torch.searchsorted(bounds, torch.minimum(*ends)).clamp(max=255).to(torch.uint8)
    return Code(exact.float().to(device), bounds.to(device), cells.to(device))


def quantise(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Return the bytes (n, 256) and the scales (n, 1) of fp32 `x` (n, 256).

    Each byte stands for the value that is nearest to x / scale.
    """
    absmax = x.abs().amax(1, keepdim=True)
    absmax = torch.where(absmax < SMALLEST, 0.0, absmax)
    unit = torch.where(absmax > 0, x / absmax, 0.0)
    index = _look_up(code.cells, (unit.view(torch.int32) >> 16) & 0xFFFF).int()
    return (index + (unit > _look_up(code.bounds, index))).to(torch.uint8), absmax


def dequantise(codes: Tensor, absmax: Tensor, code: Code) -> Tensor:
    """Return the fp32 numbers (n, 256) that `codes` (n, 256) with the scales `absmax` (n, 1) stand for."""
    return _look_up(code.values, codes.int()) * absmax


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return table[index], three times as fast on a CPU as by indexing."""
    return table.index_select(0, index.view(-1)).view(index.shape)
