"""The GPT that every recipe trains: GPT-2's architecture in plain PyTorch. It knows nothing of ranks.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm blocks, learned positions, GELU in its
tanh form, an output head tied to the token table. The head is no module of its own: it is `wte.weight` used twice, so
that every engine sees one parameter.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptscale.common.model.activations import activation_function
from gptscale.common.model.loss import LinearCrossEntropy
from gptscale.common.settings.gpt_config import GPTConfig

# What attention's kernels want of head_dim there: cuDNN's takes nothing else, for others torch pads q, k and v each by itself.
HEAD_DIM_MULTIPLE = {"cuda": 8}


def causal_attention(qkv: Tensor, dropout: float = 0.0, multiple: int = 1) -> Tensor:
    """Attention of (batch, seq, n_head, 3, head_dim), to (batch, seq, n_head * head_dim).

    multiple: head_dim is padded to one of it with zeros, which add nothing to q k and come out of v as zeros, to be cut: exact.
    The three are padded at once, where they lie side by side; under torch.compile that and the split are one kernel.
    """
    head_dim = qkv.shape[-1]
    if head_dim % multiple:
        qkv = F.pad(qkv, (0, -head_dim % multiple))
    q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (batch, n_head, seq, head_dim) each
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=1 / math.sqrt(head_dim))
    return y[..., :head_dim].transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Causal multi-head self-attention; one matrix makes query, key and value.

    Its rows are (n_head, 3, head_dim): whatever cuts them into equal parts cuts between heads, and the code below serves a
    part as it serves the whole. backend: the kernel that must compute it; None leaves the choice to torch.
    """

    backend: SDPBackend | None = None

    def __init__(self, gpt: GPTConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = gpt.head_dim, gpt.dropout
        self.qkv = nn.Linear(gpt.n_embd, 3 * gpt.n_embd)
        self.proj = nn.Linear(gpt.n_embd, gpt.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, n_embd) to the same."""
        qkv = self.qkv(x).unflatten(2, (-1, 3, self.head_dim))  # (batch, seq, n_head, 3, head_dim)
        with sdpa_kernel(self.backend) if self.backend is not None else nullcontext():
            multiple = HEAD_DIM_MULTIPLE.get(x.device.type, 1)
            y = causal_attention(qkv, self.dropout if self.training else 0.0, multiple)
        return F.dropout(self.proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two matrices with a GELU between them, four times as wide inside."""

    def __init__(self, gpt: GPTConfig) -> None:
        super().__init__()
        self.activation, self.dropout = activation_function(gpt.activation), gpt.dropout
        self.fc = nn.Linear(gpt.n_embd, 4 * gpt.n_embd)
        self.proj = nn.Linear(4 * gpt.n_embd, gpt.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, n_embd) to the same."""
        y = self.proj(self.activation(self.fc(x)))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a LayerNorm, each added to the residual stream."""

    def __init__(self, gpt: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(gpt.n_embd)
        self.attn = Attention(gpt)
        self.ln_2 = nn.LayerNorm(gpt.n_embd)
        self.mlp = MLP(gpt)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, n_embd) to the same."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """Token and position tables, blocks, final norm, tied head.

    Build it under `torch.device("meta")` and fill it with `init_weights`, so that no rank ever needs the whole model in
    memory before it is sharded.
    """

    def __init__(self, gpt: GPTConfig) -> None:
        super().__init__()
        self.config = gpt
        self.wte = nn.Embedding(gpt.padded_vocab_size, gpt.n_embd)
        self.wpe = nn.Embedding(gpt.block_size, gpt.n_embd)
        self.blocks = nn.ModuleList(Block(gpt) for _ in range(gpt.n_layer))
        self.ln_f = nn.LayerNorm(gpt.n_embd)
        self.loss = LinearCrossEntropy(gpt.vocab_size)

    def embed(self, inputs: Tensor) -> Tensor:
        """(batch, seq) token ids to (batch, seq, n_embd): what the first block reads."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return F.dropout(self.wte(inputs) + self.wpe(positions), self.config.dropout, self.training)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab_size) of `inputs` (batch, seq); with `targets` (batch, seq) the summed loss, a scalar.

        The loss is computed here, not by the caller, so that a wrapper which gathers weights around `forward` (FSDP)
        still has the head's weight at hand. Targets of -100 count nothing.
        """
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x, self.wte.weight)[..., : self.config.vocab_size]
        loss: Tensor = self.loss(x, self.wte.weight, targets)
        return loss
