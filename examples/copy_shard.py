"""Way 1: `shard` copied into a project of its own. Nothing of gptscale is imported.

torchrun --standalone --nproc-per-node 2 examples/copy_shard.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Layer(nn.Module):
    """A block of somebody else's model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


# From gptscale/recipes/fsdp.py, with the options that this project does not need taken out.
def shard(model, block_class, mesh, compute_dtype):
    policy = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)}
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    for block in blocks:
        fully_shard(block, reshard_after_forward=True, **policy)
    return fully_shard(model, reshard_after_forward=False, **policy)


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(0)  # the same weights everywhere, before they are cut
    model = nn.Sequential(nn.Linear(16, 64), *(Layer(64) for _ in range(4)), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    shard(model, Layer, mesh, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on each rank
    for step in range(40):
        x = torch.randn(64, 16, device=device)
        loss = F.mse_loss(model(x).squeeze(1), x.sin().sum(dim=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 13 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # done; torch's autograd threads can abort an interpreter's teardown, now and then
