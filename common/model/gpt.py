"""GPT-2 in plain PyTorch, and what every model here has beside its blocks.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": pre-norm blocks, learned positions, the tanh form of
GELU by default, and an output head that shares the weight of the token table.

The model knows nothing of ranks or of parallelism. Strategies change it from outside, after it is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gptscale.common.model.loss import LinearCrossEntropy
from gptscale.common.settings.shape import ModelConfig

# head_dim must be a multiple of this on a device. cuDNN's attention accepts nothing else, and for the other kernels of CUDA torch
# would pad q, k and v in three separate copies.
HEAD_DIM_MULTIPLE = {"cuda": 8}


def causal_attention(
    qkv: Tensor, dropout: float = 0.0, multiple: int = 1, attend: Callable[..., Tensor] | None = None
) -> Tensor:
    """Attend from each position to itself and to those before it.

    qkv: (batch, seq, n_head, 3, head_dim). Returns (batch, seq, n_head * head_dim).

    multiple: heads are padded with zeros until head_dim is a multiple of it. The result is the same: the zeros add nothing to the
    products of q and k, and in v they give zeros that are cut off. Padding all three at once, where they lie side by side, costs
    one copy. Under torch.compile the padding and the split are one kernel. attend: computes it in the place of torch's function.
    """
    head_dim = qkv.shape[-1]
    if head_dim % multiple:
        qkv = F.pad(qkv, (0, -head_dim % multiple))
    # (batch, n_head, seq, head_dim) each
    q, k, v = qkv.permute(3, 0, 2, 1, 4)
    attend = attend or F.scaled_dot_product_attention
    y = attend(q, k, v, is_causal=True, dropout_p=dropout, scale=1 / math.sqrt(head_dim))
    return y[..., :head_dim].transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Causal self-attention with several heads.

    One matrix computes query, key and value. Its rows are ordered (n_head, 3, head_dim), so that a cut into equal parts falls
    between heads, and `forward` works on the part of a tensor-parallel rank as it does on the whole.

    backend: the kernel that must compute attention, or None to leave the choice to torch. attend: takes the place of
    F.scaled_dot_product_attention where a rank has only a part of each sequence.
    """

    backend: SDPBackend | None = None
    attend: Callable[..., Tensor] | None = None

    def __init__(self, gpt: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.dropout = gpt.head_dim, gpt.dropout
        self.qkv = nn.Linear(gpt.n_embd, 3 * gpt.n_embd)
        self.proj = nn.Linear(gpt.n_embd, gpt.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to the same shape."""
        # (batch, seq, n_head, 3, head_dim)
        qkv = self.qkv(x).unflatten(2, (-1, 3, self.head_dim))
        dropout = self.dropout if self.training else 0.0
        with sdpa_kernel(self.backend) if self.backend is not None else nullcontext():
            y = causal_attention(qkv, dropout, HEAD_DIM_MULTIPLE.get(x.device.type, 1), self.attend)
        return F.dropout(self.proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two matrices with an activation between them, where the hidden size is four times as wide."""

    def __init__(self, gpt: ModelConfig) -> None:
        super().__init__()
        self.activation, self.dropout = activation_function(gpt.activation), gpt.dropout
        self.fc = nn.Linear(gpt.n_embd, 4 * gpt.n_embd)
        self.proj = nn.Linear(4 * gpt.n_embd, gpt.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to the same shape."""
        y = self.proj(self.activation(self.fc(x)))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention and an MLP, each behind a LayerNorm and each added to the residual stream."""

    def __init__(self, gpt: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(gpt.n_embd)
        self.attn = Attention(gpt)
        self.ln_2 = nn.LayerNorm(gpt.n_embd)
        self.mlp = MLP(gpt)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, n_embd) to the same shape."""
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Decoder(nn.Module):
    """What all families share: the tables, blocks, a final norm and the head, which ends in the loss.

    A tied head is not a module. It is `wte.weight` used a second time, so that every strategy sees one parameter.

    Build the model under `torch.device("meta")` and fill it with `init_weights` (common/model/initial_weights.py) once it is
    sharded. Then no rank ever needs memory for the whole model.
    """

    # The class of the family's blocks.
    block: type[nn.Module]
    # Whether ids come in, and whether a loss or logits come out. A stage of a pipeline may have activations on either side.
    embeds = ends = True
    # Returns the positions of n tokens in their sequence.
    positions: Callable[..., Tensor] = staticmethod(torch.arange)

    def __init__(self, config: ModelConfig, norm: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.wte: Any = nn.Embedding(config.padded_vocab_size, config.n_embd)
        has_positions = any(weight.cut == "positions" for weight in config.weights().first)
        self.wpe: Any = nn.Embedding(config.block_size, config.n_embd) if has_positions else None
        self.blocks: Any = nn.ModuleList(self.block(config) for _ in range(config.n_layer))
        self.ln_f: Any = norm
        self.head: Any = None if config.is_tied else nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.loss: Any = LinearCrossEntropy(config.vocab_size)

    @property
    def head_weight(self) -> nn.Parameter:
        """Return the matrix of the head, (padded_vocab, n_embd)."""
        weight: nn.Parameter = (self.wte if self.head is None else self.head).weight
        return weight

    def embed(self, inputs: Tensor) -> Tensor:
        """Map token ids (batch, seq) to the input of the first block, (batch, seq, n_embd)."""
        x = self.wte(inputs)
        if self.wpe is not None:
            x = x + self.wpe(self.positions(inputs.shape[1], device=inputs.device))
        return F.dropout(x, self.config.dropout, self.training)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or the summed loss if `targets` are given.

        inputs, targets: token ids, (batch, seq). A target of -100 is not counted. Logits are (batch, seq, vocab_size), the loss
        is a scalar. What stages take from each other are activations, (batch, seq, n_embd).

        The model computes the loss itself, because a wrapper that gathers weights only around `forward` (FSDP) then still has the
        weight of the head.
        """
        x = self.embed(inputs) if self.embeds else inputs
        for block in self.blocks.children():
            x = block(x)
        if not self.ends:
            return x
        x = self.ln_f(x)
        if targets is None:
            return F.linear(x, self.head_weight)[..., : self.config.vocab_size]
        loss: Tensor = self.loss(x, self.head_weight, targets)
        return loss


class GPT(Decoder):
    """GPT-2: token and position tables, blocks, a final LayerNorm and a tied head."""

    block = Block

    def __init__(self, gpt: ModelConfig) -> None:
        super().__init__(gpt, nn.LayerNorm(gpt.n_embd))


def gelu_sigmoid(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), the sigmoid form of GELU, in PyTorch's own operations."""
    return x * torch.sigmoid(1.702 * x)


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation called `name`, one of ACTIVATIONS in common/settings/gpt_config.py.

    gelu_* are PyTorch's functions. custom-* are the operators of gptscale.ops, which are compiled here if they are not yet.
    """
    if name.startswith("custom-"):
        from gptscale.ops import registry
        from gptscale.ops.gelu import gelu

        registry.ready()
        return partial(gelu, approximate=name.removeprefix("custom-"))  # type: ignore[arg-type]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "gelu_erf": F.gelu,
        "gelu_sigmoid": gelu_sigmoid,
    }
    return functions[name]
