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
model = DistributedDataParallel(torch.nn.Linear(4096, 1024, bias=False).to(device), device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters())
rank, ranks = dist.get_rank(), dist.get_world_size()
# More bytes than the mock of NCCL copies.
own, lists = {"rank": rank, "text": 100_000 * "x"}, [ranks * [None], ranks * [None], [None]]
for group in (None, gloo := dist.new_group(backend="gloo")):
    dist.all_gather_object(lists[0], own, group=group)
    dist.gather_object(own, lists[1], dst=rank, group=group)
    # As torch's own checkpoints ask for it.
    named = {"scatter_object_output_list": lists[2], "scatter_object_input_list": [*range(ranks)]}
    dist.scatter_object_list(**named, src=rank, group=group)
    assert lists == [ranks * [own], ranks * [own], [rank]]
dist.monitored_barrier(gloo)
for _ in range(1_000_000):
    rows = next(iter(torch.utils.data.DataLoader(torch.randn(64, 4096), 64, num_workers=1)))
    # The forward and backward of Lightning lie in such a closure.
    optimizer.step(lambda rows=rows: model(rows.to(device)).square().mean().backward())
    optimizer.zero_grad()
    torch.save(model.state_dict(), "new.pt")
    os.replace("new.pt", "checkpoint.pt")
