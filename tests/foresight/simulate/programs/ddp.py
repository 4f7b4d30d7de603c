"""Training as a tutorial shows it: DDP, a gathered list of objects, a checkpoint each step."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    # Where it is set, torch refuses to tell the older name.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
model = DistributedDataParallel(torch.nn.Linear(4096, 1024).to(device), device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters())
names = [None] * dist.get_world_size()
dist.all_gather_object(names, {"rank": dist.get_rank()})
assert names == [{"rank": dist.get_rank()}] * dist.get_world_size()
dist.monitored_barrier(dist.new_group(backend="gloo"))
for _ in range(1_000_000):
    model(torch.randn(64, 4096, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.state_dict(), "checkpoint.pt")
