"""Train llama3-1b with each matrix cut over 2 devices, and its state over the other ranks.

    torchrun --nproc-per-node 8 llama3_1b_tensor_fsdp.py --steps 1000 --save checkpoints
    python llama3_1b_tensor_fsdp.py --check    # every gradient, as one process computes it, on a CPU

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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def build() -> torch.nn.Module:
    """Build the model of a config of transformers."""
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def batch(size: int) -> dict[str, torch.Tensor]:
    """Return random samples. Put your data here."""
    inputs = torch.randint(0, 128256, (size, 8192))
    return {"input_ids": inputs, "labels": inputs}


RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
BLOCK = ["LlamaDecoderLayer"]
TP = min(2, max(2, WORLD // 2))
DATA_RANKS, DATA_RANK = WORLD // TP, RANK // TP
PLAN = {
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def shard(part: nn.Module, block_class: type[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype) -> FSDPModule:
    """Cut each block of a stage, then what remains, over `mesh`: 1-D for FSDP, 2-D of replicas x 1 for DDP."""
    policy: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32)}
    for block in [module for module in part.modules() if isinstance(module, block_class)]:
        fully_shard(block, **policy)
    return fully_shard(part, reshard_after_forward=False, **policy)


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
    mesh = init_device_mesh(DEVICE.type, (DATA_RANKS, TP), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], PLAN).to(DEVICE)
    dtype = torch.bfloat16 if o.precision == "bf16" else torch.float32
    shard(model, next(type(m) for m in model.modules() if type(m).__name__ in BLOCK), mesh["data"], dtype)
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in (p for p in model.parameters() if p.requires_grad):
        groups.setdefault((p.dim() > 1, getattr(p, "device_mesh", None)), []).append(p)
    alike = [{"params": group, "weight_decay": o.weight_decay * decays} for (decays, _), group in groups.items()]
    optimizer = torch.optim.AdamW(alike, lr=o.lr, betas=(0.9, 0.95), fused=True)
    return model, optimizer


def gradients(model: nn.Module, o: argparse.Namespace, step: int) -> float:
    """Leave the gradients of a step for the optimizer, and return the mean loss of the global batch."""
    total, count = torch.zeros((), device=DEVICE), o.global_batch_size // (o.micro_batch_size * DATA_RANKS)
    for micro in range(count):
        loss = loss_of(model, o, step, micro * DATA_RANKS + DATA_RANK)
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
        grads = [[p.grad for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
        norm = torch.linalg.vector_norm(torch.stack([nn.utils.get_total_norm(each).full_tensor() for each in grads if each]))
        nn.utils.clip_grads_with_norm_(model.parameters(), o.clip, norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        for log in logs:
            print(f"{step + 1},{loss:.7g},{norm:.7g},{rate:.5g},{time.perf_counter() - began:.4f}", file=log, flush=True)
        if o.save and ((step + 1) % o.save_every == 0 or step + 1 == o.steps):
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=f"{o.save}/{step + 1}")


def check(o: argparse.Namespace) -> None:
    """Compare a step's gradients in fp32 with those of one process, which each rank computes, too."""
    o.precision, o.micro_batch_size, o.global_batch_size = "fp32", 2, 4 * DATA_RANKS
    (model, _), true = split(whole(o), o), whole(o)
    gradients(model, o, 0)
    for number in range(2 * DATA_RANKS):
        (loss_of(true, o, 0, number) / (2 * DATA_RANKS)).backward()
    pairs = [(p, q.grad) for p, q in zip(model.parameters(), true.parameters(), strict=True) if q.grad is not None]
    floor = max(g.abs().max() for _, g in pairs) / 100
    worst = max(float((p.grad.full_tensor() - g).abs().max() / (g.abs().max() + floor)) for p, g in pairs)
    print(f"rank {RANK}: {'right' if worst <= 1e-5 else 'WRONG'}, gradients deviate by at most {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    defaults = {"precision": "bf16", "global_batch_size": 64, "micro_batch_size": 2, "steps": 1000}
    defaults |= {"lr": 3e-4, "warmup": 100, "weight_decay": 0.1, "clip": 1.0, "seed": 0, "save": "", "save_every": 100, "csv": ""}
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    o = parser.parse_args()
    if o.check and WORLD == 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        os.execve(sys.executable, [*launch, *sys.argv], os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    if o.global_batch_size % (o.micro_batch_size * DATA_RANKS):
        parser.error(f"{o.global_batch_size} samples are no multiple of {DATA_RANKS} x {o.micro_batch_size}")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group()
    (check if o.check else train)(o)
    dist.destroy_process_group()
