"""A pipeline as in torch's tutorial: each stage learns from the one before it what it will get.

usage: pipeline.py [STAGES_PER_RANK]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
n, per_rank = dist.get_world_size(), int([*sys.argv, "1"][1])
parts = torch.nn.ModuleList(
    torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(4)))
    for _ in range(per_rank)
).to(device)
stages = [PipelineStage(part, rank + i * n, n * per_rank, device) for i, part in enumerate(parts)]
how = {"n_microbatches": 6, "loss_fn": torch.nn.functional.mse_loss}
schedule = Schedule1F1B(stages[0], **how) if per_rank == 1 else ScheduleInterleaved1F1B(stages, **how)
optimizer = torch.optim.Adam(parts.parameters())
for _ in range(10):
    batch = torch.randn(6 * 2048, 512, device=device)
    if rank == 0:
        schedule.step(batch)
    elif rank == dist.get_world_size() - 1:
        schedule.step(target=batch)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
