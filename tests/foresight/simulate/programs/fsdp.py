"""A loop of one's own with fully_shard. It draws weights on the device and the host, and resets the peak each step."""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cuda")
for parameter in model.parameters():
    nn.init.trunc_normal_(parameter)
# Large memory of the host does not keep what is drawn.
nn.init.trunc_normal_(torch.empty(2**23), std=0.5)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(8, 2048, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
