"""Time what steps are made of, each by itself: products, attention, passes over memory, and copies over the bus."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gptscale.common.measure.speed import timed
from gptscale.common.model.gpt import HEAD_DIM_MULTIPLE, causal_attention
from gptscale.common.process.world import gather_numbers
from gptscale.common.settings.shape import ModelConfig
from gptscale.foresight.calibrate.file import Operation

PASS_BYTES = COPIED_BYTES = 2**26
Calls = dict[Operation, Callable[[], object]]


def products_of(gpt: ModelConfig, tokens: int, tp: int) -> list[tuple[Operation, int]]:
    """Return the products of a forward on one tensor rank, each with how often it does it: those of blocks, and the head's."""
    matrices = [weight for weight in gpt.weights().block if weight.is_matrix]
    cuts = [(weight, 1 if weight.cut == "rows" else tp, tp if weight.cut == "rows" else 1) for weight in matrices]
    shapes = [(weight.shape[1] // into, weight.shape[0] // out) for weight, into, out in cuts]
    products = [(Operation("product", (tokens, inner, columns)), gpt.n_layer) for inner, columns in shapes]
    return [*products, (Operation("product", (tokens, gpt.n_embd, gpt.padded_vocab_size // tp)), 1)]


def time_parts(
    gpt: ModelConfig, seq_len: int, tokens: int, tp: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[Operation, Timing]:
    """Return the seconds of each part of a model on one tensor rank, of a pass over memory, and with CUDA of copies."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    calls: Calls = {}
    for operation, _ in products_of(gpt, tokens, tp):
        rows, inner, columns = operation.shape
        calls[operation] = partial(F.linear, normal(rows, inner), normal(columns, inner))
    n_head = gpt.n_head // tp
    qkv = normal(tokens // seq_len, seq_len, n_head, 3, gpt.head_dim).requires_grad_()
    shape = (tokens, n_head * gpt.head_dim, n_head, seq_len)
    # As the model has it: with the padding for which torch takes another kernel.
    attend = partial(causal_attention, multiple=HEAD_DIM_MULTIPLE.get(device.type, 1))
    with torch.no_grad():
        grad = torch.randn_like(attend(qkv))
    forward, backward = Operation("attention forward", shape), Operation("attention backward", shape)
    calls[forward] = lambda: attend(qkv.detach())
    calls[backward] = lambda: torch.autograd.grad(attend(qkv), qkv, grad)
    numbers = torch.zeros(PASS_BYTES // 4, device=device)
    calls[Operation("pass", (2 * PASS_BYTES,))] = lambda: numbers.add_(1)
    if device.type == "cuda":
        here = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
        calls[Operation("copy", (COPIED_BYTES,))] = lambda: there.copy_(here)
    measured = timings(calls, device, repeats)
    # Attention's backward is what forward and backward take longer than forward.
    alone = max(measured[backward].seconds - measured[forward].seconds, 0.1 * measured[forward].seconds)
    return measured | {backward: measured[backward]._replace(seconds=alone)}


# Least seconds of one timing, so that the clock's grain and a launch do not show.
ROUND_S = 0.004
WARM_UP = 2


class Timing(NamedTuple):
    """The median seconds over repeats, as the mean of the ranks. spread: half the way between the quartiles, relative."""

    seconds: float
    spread: float
    repeats: int


def timings(calls: Calls, device: torch.device, repeats: int) -> dict[Operation, Timing]:
    """Time calls in turn, on all ranks at once, so that a disturbance hits one sample of each."""
    counts = {operation: _count(call, device) for operation, call in calls.items()}
    samples: dict[Operation, list[float]] = {operation: [] for operation in calls}
    for _ in range(repeats):
        for operation, call in calls.items():
            if dist.is_initialized():
                dist.barrier()
            samples[operation].append(timed(call, counts[operation], device))
    figures = [figure for series in samples.values() for figure in _median_and_spread(series)]
    means = [statistics.fmean(of_ranks) for of_ranks in zip(*gather_numbers(figures), strict=True)]
    return {
        operation: Timing(seconds, spread, repeats)
        for operation, seconds, spread in zip(samples, means[::2], means[1::2], strict=True)
    }


def _median_and_spread(series: list[float]) -> tuple[float, float]:
    ordered, n, median = sorted(series), len(series), statistics.median(series)
    return median, (ordered[3 * n // 4] - ordered[n // 4]) / 2 / median


def _count(call: Callable[[], object], device: torch.device) -> int:
    """Return how many calls last ROUND_S: the same number on all ranks, since calls may be collectives."""
    for _ in range(WARM_UP):
        call()
    own = ROUND_S / max(timed(call, 1, device), 1e-7)
    return max(1, int(min(rank[0] for rank in gather_numbers([own]))))
