"""Llama in plain PyTorch, whose shapes cover SmolLM, TinyLlama, Llama 3 and Qwen3.

Touvron et al. 2023 (arXiv 2302.13971) and Grattafiori et al. 2024 (arXiv 2407.21783): pre-norm blocks with RMSNorm, rotary
positions, groups of query heads that share keys and values, a gated MLP, and no biases.

Like common/model/gpt.py it knows nothing of ranks, and names its modules so that the strategies find the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptscale.common.model.gpt import Decoder
from gptscale.common.settings.llama_config import LlamaConfig


def frequencies(llama: LlamaConfig, device: torch.device) -> Tensor:
    """Return the angle by which each pair of a head's numbers turns per position, (head_dim / 2) in fp32.

    Su et al. 2021, arXiv 2104.09864. Llama 3 slows the turns that take longer than the sequences it was first trained with.
    """
    exponents = torch.arange(0, llama.head_dim, 2, dtype=torch.float32, device=device) / llama.head_dim
    turns = 1.0 / llama.rope_theta**exponents
    if (scaling := llama.rope_scaling) is None:
        return turns
    periods = scaling.original * turns / (2 * math.pi)
    kept = ((periods - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return turns * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn each pair of numbers of each head by its position's angle.

    x: (batch, seq, heads, head_dim), whose pairs lie half a head apart. angles: (seq, 1, head_dim / 2), always fp32.
    """
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class HeadNorm(nn.RMSNorm):
    """An RMSNorm over each head that computes in its weight's type, since under autocast matrices put out another."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, heads, head_dim) to the same shape and type."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class GroupedAttention(nn.Module):
    """Causal self-attention in which a head of keys and values serves several query heads.

    Ainslie et al. 2023, arXiv 2305.13245. Rows of each matrix are ordered (head, head_dim), so that a cut into equal parts falls
    between heads, and `forward` works on the part of a tensor-parallel rank as it does on the whole.

    backend: the kernel that must compute attention, or None to leave the choice to torch. attend, positions: as in gpt.py, set
    where a rank has only a part of each sequence.
    """

    backend: SDPBackend | None = None
    attend: Callable[..., Tensor] | None = None
    positions: Callable[..., Tensor] = staticmethod(torch.arange)

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__()
        self.config, queries, keys = llama, llama.n_head * llama.head_dim, llama.n_kv_head * llama.head_dim
        self.q = nn.Linear(llama.n_embd, queries, bias=False)
        self.k = nn.Linear(llama.n_embd, keys, bias=False)
        self.v = nn.Linear(llama.n_embd, keys, bias=False)
        self.proj = nn.Linear(queries, llama.n_embd, bias=False)
        self.q_norm = HeadNorm(llama.head_dim, llama.norm_eps) if llama.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(llama.head_dim, llama.norm_eps) if llama.qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to the same shape."""
        # (batch, seq, heads, head_dim) each
        q, k, v = (matrix(x).unflatten(2, (-1, self.config.head_dim)) for matrix in (self.q, self.k, self.v))
        angles = self.positions(q.shape[1], device=q.device)[:, None, None] * frequencies(self.config, q.device)
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        dropout = self.config.dropout if self.training else 0.0
        with sdpa_kernel(self.backend) if self.backend is not None else nullcontext():
            attend = self.attend or F.scaled_dot_product_attention
            y = attend(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=True)
        return F.dropout(self.proj(y.transpose(1, 2).flatten(2)), self.config.dropout, self.training)


class SwiGLU(nn.Module):
    """Two matrices side by side, of which one gates the other, and a third behind them: Shazeer 2020, arXiv 2002.05202."""

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__()
        self.dropout = llama.dropout
        self.gate = nn.Linear(llama.n_embd, llama.n_inner, bias=False)
        self.up = nn.Linear(llama.n_embd, llama.n_inner, bias=False)
        self.proj = nn.Linear(llama.n_inner, llama.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to the same shape."""
        y = self.proj(F.silu(self.gate(x)) * self.up(x))
        return F.dropout(y, self.dropout, self.training)


class LlamaBlock(nn.Module):
    """One layer: attention and a gated MLP, each behind an RMSNorm and each added to the residual stream."""

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__()
        self.ln_1 = nn.RMSNorm(llama.n_embd, llama.norm_eps)
        self.attn = GroupedAttention(llama)
        self.ln_2 = nn.RMSNorm(llama.n_embd, llama.norm_eps)
        self.mlp = SwiGLU(llama)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to the same shape."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Llama(Decoder):
    """The token table, blocks, a final RMSNorm, and a head that is a matrix of its own unless the config ties it."""

    block = LlamaBlock

    def __init__(self, llama: LlamaConfig) -> None:
        super().__init__(llama, nn.RMSNorm(llama.n_embd, llama.norm_eps))
