"""Train 1.6b by DeepSpeed with optimizer, gradients and weights cut over all devices.

    torchrun --nproc-per-node 8 gpt2_1_6b_zero3.py --steps 1000 --save checkpoints
    python gpt2_1_6b_zero3.py --check    # every gradient, as one process computes it, on a CPU

Written by `gptscale fit`, which it does not need.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
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


def shard(model: nn.Module, optimizer: torch.optim.Optimizer, json: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Let DeepSpeed cut `model`, which may come from `zero.Init`, and `optimizer`. On CPUs it compiles no exchange of its own."""
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=json, dist_init_required=False)[0]


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
    json: dict[str, Any] = {
        "train_batch_size": o.global_batch_size,
        "train_micro_batch_size_per_gpu": o.micro_batch_size,
        "gradient_clipping": o.clip,
        "bf16": {"enabled": o.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 50000000},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model.to(torch.bfloat16 if o.precision == "bf16" else torch.float32)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(DEVICE)
    deepspeed.zero.Init(module=model, config_dict_or_path=json)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": [p for p in trained if len(p.ds_shape) > 1], "weight_decay": o.weight_decay}]
    groups += [{"params": [p for p in trained if len(p.ds_shape) < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=o.lr, betas=(0.9, 0.95), fused=True)
    return shard(model, optimizer, json), optimizer


def gradients(model: nn.Module, o: argparse.Namespace, step: int) -> float:
    """Leave the gradients of a step for the optimizer, and return the mean loss of the global batch."""
    total, count = torch.zeros((), device=DEVICE), o.global_batch_size // (o.micro_batch_size * WORLD)
    for micro in range(count):
        loss = loss_of(model, o, step, micro * WORLD + RANK)
        model.backward(loss)
        if micro < count - 1:
            model.step()
        total += loss.detach().float() / count
    dist.all_reduce(total)
    return float(total) / WORLD


def train(o: argparse.Namespace) -> None:
    """Train to the last step, from the newest checkpoint if there is one, with a line for each step."""
    model, optimizer = split(whole(o), o)
    saved = [int(folder.name) for folder in Path(o.save).glob("[0-9]*") if folder.name.isdecimal()] if o.save else []
    if first := max(saved, default=0):
        model.load_checkpoint(o.save, tag=str(first))
    logs = [sys.stdout, *([open(o.csv, "a")] if o.csv else [])] if RANK == 0 else []
    for log in [] if first else logs:
        print("step,loss,grad_norm,lr,step_time_s", file=log)
    for step in range(first, o.steps):
        began, done = time.perf_counter(), max(0.0, (step - o.warmup) / max(1, o.steps - o.warmup))
        rate = o.lr * min((step + 1) / max(1, o.warmup), 0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = gradients(model, o, step)
        model.step()
        norm = float(model.get_global_grad_norm() or 0.0)
        for log in logs:
            print(f"{step + 1},{loss:.7g},{norm:.7g},{rate:.5g},{time.perf_counter() - began:.4f}", file=log, flush=True)
        if o.save and ((step + 1) % o.save_every == 0 or step + 1 == o.steps):
            model.save_checkpoint(o.save, tag=f"{step + 1}.part", save_latest=False)
            if RANK == 0:
                os.rename(f"{o.save}/{step + 1}.part", f"{o.save}/{step + 1}")


def check(o: argparse.Namespace) -> None:
    """Compare a step's gradients in fp32 with those of one process, which each rank computes, too."""
    o.precision, o.micro_batch_size, o.global_batch_size = "fp32", 2, 4 * WORLD
    (model, _), true = split(whole(o), o), whole(o)
    gradients(model, o, 0)
    for number in range(2 * WORLD):
        (loss_of(true, o, 0, number) / (2 * WORLD)).backward()
    pairs = [(p, q.grad) for p, q in zip(model.module.parameters(), true.parameters(), strict=True) if q.grad is not None]
    floor = max(g.abs().max() for _, g in pairs) / 100
    worst = max(float((deepspeed.utils.safe_get_full_grad(p) - g).abs().max() / (g.abs().max() + floor)) for p, g in pairs)
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
        os.execve(sys.executable, [*launch, *sys.argv], os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"})
    if o.global_batch_size % (o.micro_batch_size * WORLD):
        parser.error(f"{o.global_batch_size} samples are no multiple of {WORLD} x {o.micro_batch_size}")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    deepspeed.ops.__compatible_ops__ = {}  # or it compiles, on a CPU, an operator that only inference uses
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    (check if o.check else train)(o)
    dist.destroy_process_group()
