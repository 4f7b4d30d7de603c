"""A GPT under FSDP, of the shapes that llm-foundry's table names, in bf16. It runs by itself, and needs torch alone."""

import argparse
import functools
import os

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

DEFAULTS = {"layers": 24, "hidden": 2048, "heads": 16, "seq": 2048, "batch": 8, "accumulate": 1, "vocab": 50368}
words = argparse.ArgumentParser()
for name, value in DEFAULTS.items():
    words.add_argument(f"--{name}", type=int, default=value)
words.add_argument("--recompute", action="store_true")
words.add_argument("--strategy", default="FULL_SHARD")
o = words.parse_args()
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


class DecoderBlock(nn.Module):
    """Attention and a feed-forward part, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(o.hidden, bias=False), nn.LayerNorm(o.hidden, bias=False)
        self.wqkv, self.out = nn.Linear(o.hidden, 3 * o.hidden, bias=False), nn.Linear(o.hidden, o.hidden, bias=False)
        self.up, self.down = (
            nn.Linear(o.hidden, 4 * o.hidden, bias=False),
            nn.Linear(4 * o.hidden, o.hidden, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream behind this block."""
        b, t, h = x.shape
        q, k, v = self.wqkv(self.norm_1(x)).view(b, t, 3, o.heads, h // o.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, h)
        x = x + self.out(y)
        fed: torch.Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + fed


class Model(nn.Module):
    """A decoder whose head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(o.vocab, o.hidden)
        self.wpe = nn.Embedding(o.seq, o.hidden)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.hidden, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of (batch, tokens)."""
        x = self.wte(ids) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)


def fill(module: nn.Module) -> None:
    """Give a module of the meta device memory on the GPU."""
    module.to_empty(device="cuda", recurse=False)


with torch.device("meta"):
    plain = Model()
model = FullyShardedDataParallel(
    plain,
    auto_wrap_policy=ModuleWrapPolicy({DecoderBlock}),
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
        check_fn=lambda m: isinstance(m, DecoderBlock),
    )
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for _step in range(10):
    for _micro in range(o.accumulate):
        ids = torch.randint(0, o.vocab, (o.batch, o.seq + 1)).cuda()
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        (loss / o.accumulate).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
