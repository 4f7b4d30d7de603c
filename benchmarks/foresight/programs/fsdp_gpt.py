"""A GPT or a Llama under FSDP, of the shapes that tables of others name, in bf16, as a program that runs by itself."""

import argparse
import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# inner, kv: of a Llama, the width of its MLP and its heads of keys and values. A GPT has no inner. recompute: blocks that
# compute their forward again, evenly spaced.
DEFAULTS = {
    "layers": 24,
    "hidden": 2048,
    "heads": 16,
    "inner": 0,
    "kv": 0,
    "seq": 2048,
    "batch": 8,
    "accumulate": 1,
    "vocab": 50368,
    "recompute": 0,
}
words = argparse.ArgumentParser()
for name, value in DEFAULTS.items():
    words.add_argument(f"--{name}", type=int, default=value)
words.add_argument("--strategy", default="FULL_SHARD")
words.add_argument("--compile", action="store_true")
o = words.parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
linear = functools.partial(nn.Linear, bias=False)


class DecoderBlock(nn.Module):
    """Attention and a feed-forward part, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(o.hidden, bias=False), nn.LayerNorm(o.hidden, bias=False)
        self.wqkv, self.out = linear(o.hidden, 3 * o.hidden), linear(o.hidden, o.hidden)
        self.up, self.down = linear(o.hidden, 4 * o.hidden), linear(4 * o.hidden, o.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream behind this block."""
        b, t, h = x.shape
        q, k, v = self.wqkv(self.norm_1(x)).view(b, t, 3, o.heads, h // o.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.out(y)
        fed: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + fed


class RMSNorm(nn.Module):
    """As Llamas of that day wrote it: in fp32, of plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(o.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of x with a mean square of 1, weighted."""
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class GatedBlock(nn.Module):
    """Attention with rotary positions and heads of keys and values that serve several, and a gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        keys = o.hidden // o.heads * o.kv
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.wq, self.wk, self.wv = linear(o.hidden, o.hidden), linear(o.hidden, keys), linear(o.hidden, keys)
        self.out = linear(o.hidden, o.hidden)
        self.gate, self.up = linear(o.hidden, o.inner), linear(o.hidden, o.inner)
        self.down = linear(o.inner, o.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the stream behind this block."""
        b, t, h = x.shape
        y = self.norm_1(x)
        q, k, v = (w(y).view(b, t, -1, h // o.heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if o.kv < o.heads:
            k, v = (heads.repeat_interleave(o.heads // o.kv, 1) for heads in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.out(y)
        y = self.norm_2(x)
        fed: torch.Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + fed


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs of numbers of each head, which lie half a head apart."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Model(nn.Module):
    """A decoder. A GPT's head is its table, and a Llama's is a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(o.vocab, o.hidden)
        if o.inner:
            self.norm: nn.Module = RMSNorm()
            self.head = linear(o.hidden, o.vocab)
        else:
            self.wpe = nn.Embedding(o.seq, o.hidden)
            self.norm = nn.LayerNorm(o.hidden, bias=False)
        self.blocks = nn.ModuleList((GatedBlock if o.inner else DecoderBlock)() for _ in range(o.layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of (batch, tokens)."""
        x = self.wte(ids)
        if not o.inner:
            x = x + self.wpe.weight
        for block in self.blocks:
            x = block(x, cos, sin) if o.inner else block(x)
        x = self.norm(x)
        return self.head(x) if o.inner else F.linear(x, self.wte.weight)


def fill(module: nn.Module) -> None:
    """Give a module of the meta device memory on the GPU."""
    module.to_empty(device="cuda", recurse=False)


blocks_seen = 0


def recomputes(module: nn.Module) -> bool:
    """Return whether a module is one of the blocks that compute their forward again."""
    global blocks_seen
    if not isinstance(module, (DecoderBlock, GatedBlock)):
        return False
    blocks_seen += 1
    return bool(blocks_seen * o.recompute // o.layers > (blocks_seen - 1) * o.recompute // o.layers)


# The turns of rotary positions, which are the same for all blocks.
pairs = torch.arange(0, o.hidden // o.heads, 2, device="cuda") / (o.hidden // o.heads)
angles = (torch.arange(o.seq, device="cuda")[:, None] / 10_000.0**pairs).repeat(1, 2)
cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
with torch.device("meta"):
    plain = Model()
model = FullyShardedDataParallel(
    plain,
    auto_wrap_policy=ModuleWrapPolicy({DecoderBlock, GatedBlock}),
    sharding_strategy=ShardingStrategy[o.strategy],
    mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    use_orig_params=True,
    device_id=torch.cuda.current_device(),
    limit_all_gathers=True,
    param_init_fn=fill,
)
if o.recompute:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=recomputes,
    )
called: Callable[..., torch.Tensor] = torch.compile(model) if o.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _step in range(10):
    for _micro in range(o.accumulate):
        ids = torch.randint(0, o.vocab, (o.batch, o.seq + 1)).cuda()
        logits = called(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss / o.accumulate).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
