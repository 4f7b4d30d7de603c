"""Train 1.6b with its state cut over all devices.

    torchrun --nproc-per-node 8 gpt2_1_6b_fsdp.py --steps 1000 --save checkpoints
    python gpt2_1_6b_fsdp.py --check    # every gradient, as one process computes it, on a CPU

Written by `gptscale fit`, which it does not need.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

CONFIG = {
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "n_embd": 1600,
    "n_head": 32,
    "n_layer": 48,
    "resid_pdrop": 0.0,
}


def build() -> torch.nn.Module:
    """Build the model of a config of transformers."""
    return GPT2LMHeadModel(GPT2Config(**CONFIG))


def batch(size: int) -> dict[str, torch.Tensor]:
    """Return random samples. Put your data here."""
    inputs = torch.randint(0, 50257, (size, 1024))
    return {"input_ids": inputs, "labels": inputs}


RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
BLOCK = ["GPT2Block"]
FSDPConfig = argparse.Namespace


def shard(
    model: nn.Module, block_class: type[nn.Module], config: FSDPConfig, mesh: DeviceMesh, compute_dtype: torch.dtype
) -> FSDPModule:
    """Cut each `block_class` in `model`, then what remains, over `mesh`: a 2-D one replicates over its first axis (HSDP)."""
    policy: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32)}
    if config.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, block_class)]
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **policy)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + config.prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, i - config.prefetch) : i][::-1])
    # Backward needs the root's tables and last norm again at once: resharding them would only gather them twice.
    return fully_shard(model, reshard_after_forward=False, **policy)


def loss_of(model: nn.Module, o: argparse.Namespace, step: int, number: int) -> Tensor:
    """Return the mean loss of a micro-batch of the global batch. It is the same on whichever rank, with its dropout."""
    torch.manual_seed((o.seed * 1_000_003 + step) * 65_537 + number)
    inputs = {name: value.to(DEVICE) for name, value in batch(o.micro_batch_size).items()}
    return model(**inputs).loss


def whole(o: argparse.Namespace) -> nn.Module:
    """Build the model on the host, the same on all ranks, with two blocks of each list for a check."""
    torch.manual_seed(o.seed)
    model = build().train()
    for module in model.modules() if o.check else []:
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]).__name__ in BLOCK:
            del module[2:]
    return model


def split(model: nn.Module, o: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Cut a model over the devices, and make its optimizer: matrices decay, norms and biases do not."""
    dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    config = FSDPConfig(reshard_after_forward=True, prefetch=1, cpu_offload=False)
    shard(model, next(type(m) for m in model.modules() if type(m).__name__ in BLOCK), config, mesh, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": o.weight_decay}]
    groups += [{"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=o.lr, betas=(0.9, 0.95), fused=True)
    return model, optimizer


def gradients(model: nn.Module, o: argparse.Namespace, step: int) -> float:
    """Leave the gradients of a step for the optimizer, and return the mean loss of the global batch."""
    total, count = torch.zeros((), device=DEVICE), o.global_batch_size // (o.micro_batch_size * WORLD)
    for micro in range(count):
        loss = loss_of(model, o, step, micro * WORLD + RANK)
        (loss / count).backward()
        total += loss.detach().float() / count
    dist.all_reduce(total)
    return float(total) / WORLD


def train(o: argparse.Namespace) -> None:
    """Train to the last step, from the newest checkpoint if there is one, with a line for each step."""
    model, optimizer = split(whole(o), o)
    saved = [int(file.parent.name) for file in Path(o.save).glob("*/.metadata")] if o.save else []
    if first := max(saved, default=0):
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{o.save}/{first}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    logs = [sys.stdout, *([open(o.csv, "a")] if o.csv else [])] if RANK == 0 else []
    for log in [] if first else logs:
        print("step,loss,grad_norm,lr,step_time_s", file=log)
    for step in range(first, o.steps):
        began, done = time.perf_counter(), max(0.0, (step - o.warmup) / max(1, o.steps - o.warmup))
        rate = o.lr * min((step + 1) / max(1, o.warmup), 0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = gradients(model, o, step)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), o.clip).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
        for log in logs:
            print(f"{step + 1},{loss:.7g},{norm:.7g},{rate:.5g},{time.perf_counter() - began:.4f}", file=log, flush=True)
        if o.save and ((step + 1) % o.save_every == 0 or step + 1 == o.steps):
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=f"{o.save}/{step + 1}")


def check(o: argparse.Namespace) -> None:
    """Compare a step's gradients in fp32 with those of one process, which each rank computes, too."""
    o.precision, o.micro_batch_size, o.global_batch_size = "fp32", 2, 4 * WORLD
    (model, _), true = split(whole(o), o), whole(o)
    gradients(model, o, 0)
    for number in range(2 * WORLD):
        (loss_of(true, o, 0, number) / (2 * WORLD)).backward()
    pairs = [(p, q.grad) for p, q in zip(model.parameters(), true.parameters(), strict=True) if q.grad is not None]
    floor = max(g.abs().max() for _, g in pairs) / 100
    worst = max(float((p.grad.full_tensor() - g).abs().max() / (g.abs().max() + floor)) for p, g in pairs)
    print(f"rank {RANK}: {'right' if worst <= 1e-5 else 'WRONG'}, gradients deviate by at most {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    defaults = {"precision": "bf16", "global_batch_size": 64, "micro_batch_size": 8, "steps": 1000}
    defaults |= {"lr": 3e-4, "warmup": 100, "weight_decay": 0.1, "clip": 1.0, "seed": 0, "save": "", "save_every": 100, "csv": ""}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    o = parser.parse_args()
    if o.check and WORLD == 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execve(sys.executable, [*launch, *sys.argv], os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    if o.global_batch_size % (o.micro_batch_size * WORLD):
        parser.error(f"{o.global_batch_size} samples are no multiple of {WORLD} x {o.micro_batch_size}")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group()
    (check if o.check else train)(o)
    dist.destroy_process_group()
