"""Way 2: `shard` imported, for a model and a loop of one's own.

torchrun --standalone --nproc-per-node 2 examples/import_shard.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gptscale.recipes import ddp, fsdp


def my_model() -> nn.Module:
    """Anything built of blocks; here torch's own encoder."""
    layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, num_layers=2), nn.Linear(32, 8))


def losses(model: nn.Module, device: torch.device, rank: int) -> list[float]:
    """Train to reproduce the input, ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(10):
        x = torch.randn(4, 12, 8, generator=generator).to(device)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    replicated = ddp.shard(my_model().to(device), bucket_cap_mb=1.0)
    torch.manual_seed(0)
    sharded = my_model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fsdp.shard(sharded, nn.TransformerEncoderLayer, fsdp.FSDPConfig(), mesh, torch.float32)

    for name, model in (("ddp", replicated), ("fsdp", sharded)):
        found = losses(model, device, rank)
        if rank == 0:
            print(f"{name}: loss {found[0]:.6f} loss {found[-1]:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # done; torch's autograd threads can abort an interpreter's teardown, now and then
