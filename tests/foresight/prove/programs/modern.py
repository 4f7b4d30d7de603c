"""A program as people write it for GPUs today: flex attention, activation checkpointing, FSDP 2 whose gradients are sums."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

WORLD, SAMPLES, LENGTH, WIDTH = int(os.environ.get("WORLD_SIZE", "1")), 8, 32, 16
attend, make_mask = torch.compile(flex_attention), torch.compile(create_block_mask)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.slope = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x, mask):
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).split([WIDTH, 8, 8], -1))
        nearer = lambda score, batch, head, i, j: score - self.slope[head] * (i - j)  # noqa: E731
        return x + self.out(attend(q, k, v, nearer, mask, enable_gqa=True).transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(40, WIDTH), Block(), nn.Linear(WIDTH, 40)

    def forward(self, tokens, mask):
        return self.head(checkpoint(self.block, self.embedding(tokens), mask, use_reentrant=False))


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
print(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)
torch.manual_seed(0)
model = Model().to(device)
if WORLD > 1:
    fully_shard(model.block)
    fully_shard(model, reshard_after_forward=False)
    for module in (model, model.block):
        module.set_gradient_divide_factor(1.0)
mask = make_mask(lambda batch, head, i, j: i >= j, None, None, LENGTH, LENGTH, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
data = torch.randint(0, 40, (20, SAMPLES, LENGTH + 1))
for step in data:
    tokens = step.chunk(WORLD)[dist.get_rank()].to(device)
    loss = nn.functional.cross_entropy(
        model(tokens[:, :-1], mask).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    (loss / (SAMPLES * LENGTH)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if WORLD > 1 else norm
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm, True)
    optimizer.step()
    optimizer.zero_grad()
