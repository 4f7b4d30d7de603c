"""Time what steps are made of, each by itself: products, attention, passes over memory, and copies over the bus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gptscale.common.model.gpt import causal_attention
from gptscale.common.settings.gpt_config import GPTConfig
from gptscale.foresight.calibrate.file import Operation
from gptscale.foresight.calibrate.timing import Timing, timings

PASS_BYTES = COPIED_BYTES = 2**26
Calls = dict[Operation, Callable[[], object]]


def products_of(gpt: GPTConfig, tokens: int, tp: int) -> list[tuple[Operation, int]]:
    """Return the products of a forward on one tensor rank, each with how often it does it: those of blocks, and the head's."""
    h = gpt.n_embd
    shapes = [(h, 3 * h // tp), (h // tp, h), (h, 4 * h // tp), (4 * h // tp, h)]
    products = [(Operation("product", (tokens, inner, columns)), gpt.n_layer) for inner, columns in shapes]
    return [*products, (Operation("product", (tokens, h, gpt.padded_vocab_size // tp)), 1)]


def time_parts(
    gpt: GPTConfig, seq_len: int, tokens: int, tp: int, dtype: torch.dtype, device: torch.device, repeats: int
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
    with torch.no_grad():
        grad = torch.randn_like(causal_attention(qkv))
    forward, backward = Operation("attention forward", shape), Operation("attention backward", shape)
    calls[forward] = lambda: causal_attention(qkv.detach())
    calls[backward] = lambda: torch.autograd.grad(causal_attention(qkv), qkv, grad)
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
