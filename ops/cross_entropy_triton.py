"""Cross entropy and its gradient for GPUs, in Triton: the gradient overwrites the logits, which may be of any float type.

    loss = log sum_j exp(x_j) - x_target        d loss / d x_j = softmax(x)_j - [j = target]

A program has one row and goes over it twice: first for the largest logit and the sum of exponentials (Milakov and Gimelshein
2018, arXiv 1805.02867), then to overwrite it. It computes in fp32 in registers, so that there is never an fp32 copy of a
16-bit row. Few rows are computed at the same time, so the second pass finds its row still in the L2 cache, and each byte moves
from and to memory once. Loads cover the whole row with its padding, because a mask that ends inside 16 bytes would turn them
into loads of single elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# With 64 registers a thread, 2 programs fit on a multiprocessor: 132 x 2 rows of 50304 logits in bf16 are 27 MB of 50 MB of L2.
BLOCK, WARPS = 8192, 16
# The lowest number of fp32. With -inf in its place, a first block that is all -inf would give NaN.
LOWEST = -3.4028234663852886e38


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    stride,
    VOCAB_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    IGNORED: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of one row, and overwrite the row with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        for first in range(0, COLUMNS, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(row_ptr + at, tl.zeros((BLOCK,), logits_ptr.dtype.element_ty), mask=at < COLUMNS)
    else:
        of_target = tl.load(row_ptr + target).to(tl.float32)
        largest = tl.full((), LOWEST, tl.float32)
        # One sum for each lane, so that only the maxima have to be combined across lanes in the loop.
        sums = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, VOCAB_SIZE, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + at, mask=at < COLUMNS, other=0.0, eviction_policy="evict_last")
            x = tl.where(at < VOCAB_SIZE, x.to(tl.float32), float("-inf"))
            larger = tl.maximum(largest, tl.max(x, axis=0))
            sums = sums * tl.exp(largest - larger) + tl.exp(x - larger)
            largest = larger
        total = tl.sum(sums, axis=0)
        inverse = 1.0 / total
        tl.store(losses_ptr + row, tl.log(total) + (largest - of_target))
        for first in range(0, COLUMNS, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + at, mask=at < COLUMNS, other=0.0, eviction_policy="evict_first")
            probability = tl.exp(x.to(tl.float32) - largest) * inverse
            grad = tl.where(at < VOCAB_SIZE, probability - tl.where(at == target, 1.0, 0.0), 0.0)
            tl.store(row_ptr + at, grad.to(logits_ptr.dtype.element_ty), mask=at < COLUMNS)


def cross_entropy_(
    logits: Tensor, targets: Tensor, vocab_size: int, ignored: int, *, block: int = BLOCK, warps: int = WARPS
) -> Tensor:
    """Return the summed loss as an fp32 scalar, and overwrite `logits` with d loss / d logits in their own type.

    The loss has the same bits in each run.

    logits: (rows, columns), with stride 1 along columns. Columns from `vocab_size` on do not count, and their gradient is 0.
    targets: (rows,), int64. A row whose target is `ignored` has no loss and a gradient of 0.
    block: how many columns a program takes at once, with `warps` warps of threads.
    """
    assert logits.stride(1) == 1
    losses = torch.empty(len(logits), device=logits.device, dtype=torch.float32)
    if len(logits):
        _cross_entropy_kernel[(len(logits),)](
            logits, targets.contiguous(), losses, logits.stride(0), VOCAB_SIZE=vocab_size, COLUMNS=logits.shape[1],
            IGNORED=ignored, LOWEST=LOWEST, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return losses.sum()
