"""GPT-2 and its training step in a hundred lines, as someone writes them by hand who wants speed and nothing else.

`python -m benchmarks.model` compares the package with it. Nothing here is the package's: there are plain modules, PyTorch's
attention, whole logits, PyTorch's cross entropy and clipping, fused AdamW, and torch.compile over the whole model where it is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MinimalBlock(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside a residual."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.attn_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.mlp_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for `x`, both (batch, seq, n_embd)."""
        batch, seq, n_embd = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(batch, seq, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(batch, seq, n_embd))
        mlp: Tensor = self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return x + mlp


class MinimalGPT(nn.Module):
    """A GPT of two tables, blocks, a final norm and a tied head.

    table_rows: rows of the token table, `vocab_size` or some more, so that the head's matrix product fits tensor cores.
    """

    def __init__(
        self, *, n_layer: int, n_head: int, n_embd: int, block_size: int, vocab_size: int, table_rows: int
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.wte, self.wpe = nn.Embedding(table_rows, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(MinimalBlock(n_embd, n_head) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, table_rows, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar, of `targets` after `inputs`, both (batch, seq).

        A target of -100 counts nothing.
        """
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x)).flatten(0, 1)[:, : self.vocab_size]
        return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=-100)


def make_step(
    model: MinimalGPT, *, lr: float, clip_grad_norm: float, compile: bool, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that takes one optimizer step on (inputs, targets) and returns the loss before it."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    forward: Callable[[Tensor, Tensor], Tensor] = torch.compile(model) if compile else model
    context: AbstractContextManager[None] = nullcontext()
    if dtype != torch.float32:
        context = torch.autocast(device.type, dtype)  # type: ignore[assignment]

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with context:
            loss = forward(inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
