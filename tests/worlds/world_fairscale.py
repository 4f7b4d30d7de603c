"""Run as ranks: four steps of a small GPT-like model under DDP and under ShardedDataParallel, zeroed in either way.

usage: world_fairscale.py OUT; rank 0 writes OUT/losses.json
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptscale.common.process.rendezvous import open_store
from gptscale.common.process.world import World


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.mix = nn.Embedding(64, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        logits = self.head(self.mix(self.table(ids[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def losses(tied, ids, kind, buckets=2**23):
    model = Model(tied)
    if kind == "ddp":
        wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-2)
        wrapped = ShardedDataParallel(model, optimizer, reduce_buffer_size=buckets)
    found = []
    for _ in range(5):
        loss = wrapped(ids)
        loss.backward()
        optimizer.step()
        (wrapped if kind == "model.zero_grad" else optimizer).zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        found.append(loss.item())
    return found


if __name__ == "__main__":
    world = World.from_environment("cpu")
    store = open_store(world.rank, world.timeout_s)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
    ids = torch.randint(0, 64, (8, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = {}
    for name, tied in (("tied", True), ("untied", False)):
        found[f"{name} ddp"] = losses(tied, ids, "ddp")
        found[f"{name} sdp model.zero_grad"] = losses(tied, ids, "model.zero_grad")
        found[f"{name} sdp optimizer.zero_grad"] = losses(tied, ids, "optimizer.zero_grad")
        found[f"{name} sdp optimizer.zero_grad, no buckets"] = losses(tied, ids, "optimizer.zero_grad", 0)
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "losses.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # The threads of torch can abort the interpreter's own teardown.
    os._exit(0)
