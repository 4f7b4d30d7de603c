"""Time the parts of a block by themselves: products, attention, and passes over the activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptscale.common.model.activations import activation_function
from gptscale.common.model.gpt import causal_attention
from gptscale.common.settings.shape import ModelConfig as GPTConfig
from gptscale.foresight.calibrate.timing import Timing, timings
from gptscale.foresight.time.operations import AttentionShape, PassShape, ProductShape
from gptscale.foresight.time.work import Operation

Calls = dict[Operation, Callable[[], object]]


def time_parts(
    gpt: GPTConfig, seq_len: int, tokens: int, tp: int, dtype: torch.dtype, device: torch.device, on: str, repeats: int
) -> dict[Operation, Timing]:
    """Return the seconds of each part of a block on one tensor rank."""
    calls = part_calls(gpt, seq_len, tokens, tp, dtype, device, on)
    # Attention's backward is what forward and backward take longer than forward.
    measured = timings(calls, device, repeats)
    forward, both = (next(op for op in calls if op.kind == f"attention {way}") for way in ("forward", "backward"))
    backward = max(measured[both].seconds - measured[forward].seconds, 0.1 * measured[forward].seconds)
    return measured | {both: measured[both]._replace(seconds=backward)}


def part_calls(
    gpt: GPTConfig, seq_len: int, tokens: int, tp: int, dtype: torch.dtype, device: torch.device, on: str
) -> Calls:
    """Return a call for each part. That of attention's backward computes the forward too."""
    h = gpt.n_embd

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    calls: Calls = {}
    for inner, columns in ((h, 3 * h // tp), (h // tp, h), (h, 4 * h // tp), (4 * h // tp, h)):
        x, weight, bias = normal(tokens, inner), normal(columns, inner), normal(columns)
        shape = ProductShape(tokens, inner, columns)
        calls[Operation("product", shape, on)] = partial(F.linear, x, weight, bias)
    n_head = gpt.n_head // tp
    qkv = normal(tokens // seq_len, seq_len, n_head, 3, gpt.head_dim).requires_grad_()
    attention = AttentionShape(tokens, h // tp, n_head, seq_len)

    def both() -> None:
        causal_attention(qkv).backward(grad)
        qkv.grad = None

    with torch.no_grad():
        grad = torch.randn_like(causal_attention(qkv))
    calls[Operation("attention forward", attention, on)] = lambda: causal_attention(qkv.detach())
    calls[Operation("attention backward", attention, on)] = both
    x, wide = normal(tokens, h), normal(tokens, 4 * h // tp)
    norm, activation = nn.LayerNorm(h, device=device, dtype=dtype), activation_function(gpt.activation)
    table = nn.Embedding(gpt.padded_vocab_size, h, device=device, dtype=dtype)
    ids = torch.randint(0, gpt.vocab_size, (tokens,), device=device)
    passes: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "norm": (h, lambda: norm(x).detach()),
        "activation": (wide.shape[1], lambda: activation(wide)),
        "residual": (h, lambda: x + x),
        "embedding": (h, lambda: table(ids).detach()),
    }
    for kind, (columns, call) in passes.items():
        calls[Operation(kind, PassShape(tokens, columns), on)] = call
    return calls
