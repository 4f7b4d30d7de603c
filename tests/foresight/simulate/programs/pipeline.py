"""A pipeline of three stages, as in torch's tutorial: each stage learns from the one before it what it will get."""

import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(4)))
stage = PipelineStage(layers.to(device), rank, dist.get_world_size(), device)
schedule = Schedule1F1B(stage, n_microbatches=6, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.Adam(layers.parameters())
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
