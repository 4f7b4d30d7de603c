"""A Llama of transformers by every strategy: each function is what the strategy needs beside the model and the loop.

torchrun --standalone --nproc-per-node 2 examples/llama.py [fsdp zero3 ...]

Each takes the model and returns a step, which takes the whole batch, trains, and returns the loss of this rank's part. All
losses are those of one process, or the program ends with 1.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from gptscale.common.engines.context_parallel import attend_in_ring
from gptscale.common.engines.zero import operators
from gptscale.recipes import accelerate_fsdp as by_accelerate
from gptscale.recipes import context_parallel as by_context
from gptscale.recipes import ddp as by_ddp
from gptscale.recipes import fabric as by_fabric
from gptscale.recipes import fairscale_sdp as by_fairscale
from gptscale.recipes import fsdp as by_fsdp
from gptscale.recipes import hybrid_3d as by_hybrid
from gptscale.recipes import pipeline as by_pipeline
from gptscale.recipes import tensor_parallel as by_tensor
from gptscale.recipes import zero as by_zero

CUDA = torch.cuda.is_available()
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
VOCAB, BATCH, SEQ, STEPS, CLIP = 256, 8, 32, 12, 0.5
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5}
Step = Callable[[Tensor], Tensor]


def llama() -> LlamaForCausalLM:
    """Return a small Llama with the same weights on each rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes)).to(DEVICE)


def batch(step: int) -> Tensor:
    """Return the token ids of a step, (BATCH, SEQ + 1): sequences that repeat, so that there is something to learn."""
    ids = torch.randint(VOCAB, (BATCH, 8), generator=torch.Generator().manual_seed(step % 2))
    return ids.repeat(1, SEQ // 8 + 1)[:, : SEQ + 1].to(DEVICE)


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return the mean loss over tokens."""
    logits = model(input_ids=inputs, use_cache=False, **options).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def norm_of(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients, of which a rank may hold a part of each."""
    norms = [p.grad.norm() for p in parameters if p.grad is not None]
    return torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()


def own(ids: Tensor) -> Tensor:
    """Return the samples of this rank."""
    return ids.chunk(WORLD)[RANK]


def clip(model: nn.Module) -> None:
    """Scale all gradients so that their norm is at most CLIP."""
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm_of([*model.parameters()]), foreach=False)


def step_of(
    model: nn.Module,
    optimizer: Any,
    part: Callable[[Tensor], Tensor] = own,
    clip: Any = clip,
    gradients: Callable[[Tensor, Tensor], Tensor] | None = None,
    **options: Any,
) -> Step:
    """Return the usual step: forward, backward, clip, step.

    part: what this rank has of inputs and of targets. clip: scales the gradients of a model. gradients: does forward and
    backward, and returns the loss. options: of the forward.
    """

    def step(ids: Tensor) -> Tensor:
        inputs, targets = part(ids[:, :-1]), part(ids[:, 1:])
        if gradients:
            loss = gradients(inputs, targets)
        else:
            loss = mean_loss(model, inputs, targets, **options)
            loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over weights of which some may be cut."""
    return torch.optim.AdamW(model.parameters(), **ADAMW, foreach=False)


def single(model: nn.Module) -> Step:
    return step_of(model, adamw(model), lambda ids: ids)


def ddp(model: nn.Module) -> Step:
    return step_of(by_ddp.shard(model), adamw(model))


def fsdp(model: nn.Module) -> Step:
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    by_fsdp.shard(model, LlamaDecoderLayer, by_fsdp.FSDPConfig(), mesh, torch.float32)
    return step_of(model, adamw(model))


def fsdp_offload(model: nn.Module) -> Step:
    mesh = init_device_mesh(DEVICE.type, (WORLD,))
    by_fsdp.shard(model, LlamaDecoderLayer, by_fsdp.FSDPConfig(cpu_offload=True), mesh, torch.float32)
    return step_of(model, adamw(model))


def zero(model: nn.Module, config: by_zero.ZeroConfig) -> Step:
    """Serve zero1, zero2, zero3, zero_offload and zero_infinity."""
    json = by_zero.ds_config(config, sum(p.numel() for p in model.parameters()), VOCAB * 64, WORLD, pins=CUDA)
    json |= {"train_micro_batch_size_per_gpu": BATCH // WORLD, "gradient_clipping": CLIP}
    # For NVMe. Else DeepSpeed compiles them here, for minutes and silently.
    operators.load(config.ops)
    engine = by_zero.shard(model, torch.optim.AdamW(model.parameters(), **ADAMW), json)

    def step(ids: Tensor) -> Tensor:
        loss = mean_loss(engine, own(ids[:, :-1]), own(ids[:, 1:]))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def zero1(model: nn.Module) -> Step:
    return zero(model, by_zero.ZeroConfig(stage=1))


def zero2(model: nn.Module) -> Step:
    return zero(model, by_zero.ZeroConfig(stage=2))


def zero3(model: nn.Module) -> Step:
    return zero(model, by_zero.ZeroConfig(stage=3))


def zero_offload(model: nn.Module) -> Step:
    return zero(model, by_zero.ZeroConfig(stage=2, offload="cpu"))


def zero_infinity(model: nn.Module) -> Step:
    folder = Path(tempfile.gettempdir(), f"swap-{os.getppid()}")
    return zero(model, by_zero.ZeroConfig(stage=3, offload="nvme", nvme_path=folder))


def fairscale_sdp(model: nn.Module) -> Step:
    config, groups = by_fairscale.FairscaleSDPConfig(), [{"params": [*model.parameters()]}]
    sharded, optimizer = by_fairscale.shard(model, config, groups, torch.optim.AdamW, **ADAMW)
    # A rank has the gradients of some weights only, so that torch's own function would find another norm on each.
    return step_of(sharded, optimizer, clip=lambda _: optimizer.clip_grad_norm(CLIP))


def accelerate_fsdp(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    _, sharded, prepared = by_accelerate.shard(model, optimizer, {LlamaDecoderLayer}, torch.float32)
    return step_of(sharded, prepared)


def lightning_fabric(model: nn.Module) -> Step:
    options = {"accelerator": DEVICE.type, "devices": WORLD}
    fabric = by_fabric.shard(by_fabric.LightningFabricConfig(), LlamaDecoderLayer, WORLD, **options)
    sharded = fabric.setup_module(model)
    return step_of(sharded, fabric.setup_optimizers(adamw(model)))


def tensor_parallel(model: nn.Module) -> Step:
    styles = {"colwise": ColwiseParallel(), "rowwise": RowwiseParallel()}
    plan = {name: styles[how] for name, how in model.tp_plan.items() if how in styles}
    by_tensor.shard(model, plan, init_device_mesh(DEVICE.type, (WORLD,)))
    return step_of(model, adamw(model), lambda ids: ids)


def context_parallel(model: nn.Module) -> Step:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return attend_in_ring(q, k, v, group=dist.group.WORLD).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("ring", attend)
    model.config._attn_implementation = "ring"
    cut = partial(by_context.shard, rank=RANK, size=WORLD, style="ring")
    places = cut(torch.arange(SEQ, device=DEVICE)[None])
    return step_of(by_ddp.shard(model), adamw(model), cut, position_ids=places)


def pipeline(model: nn.Module) -> Step:
    mesh, ids = init_device_mesh(DEVICE.type, (WORLD,)), batch(0)[: BATCH // 4]
    stage, run = by_pipeline.shard_chain(model, LlamaDecoderLayer, mean_loss, (ids[:, :-1], ids[:, 1:]), mesh, 4)
    return step_of(stage, adamw(stage), lambda ids: ids, clip_stages(mesh), run)


def clip_stages(mesh: DeviceMesh) -> Callable[[nn.Module], None]:
    def clip(stage: nn.Module) -> None:
        square = norm_of([*stage.parameters()]) ** 2
        dist.all_reduce(square, group=mesh.get_group())
        nn.utils.clip_grads_with_norm_(stage.parameters(), CLIP, square.sqrt(), foreach=False)

    return clip


def hybrid_3d(model: nn.Module) -> Step:
    mesh, ids = init_device_mesh(DEVICE.type, (2, WORLD // 2), mesh_dim_names=("pipeline", "data")), batch(0)
    rank, ids = mesh.get_local_rank("data"), ids[: len(ids) // (WORLD // 2) // 4]
    sample = ids[:, :-1], ids[:, 1:]
    stage, run = by_pipeline.shard_chain(model, LlamaDecoderLayer, mean_loss, sample, mesh["pipeline"], 4)
    by_hybrid.shard(stage, LlamaDecoderLayer, mesh["data"], torch.float32)
    return step_of(stage, adamw(stage), lambda ids: ids.chunk(WORLD // 2)[rank], clip_stages(mesh["pipeline"]), run)


STRATEGIES = (
    ddp, fsdp, fsdp_offload, zero1, zero2, zero3, zero_offload, zero_infinity, fairscale_sdp, accelerate_fsdp, lightning_fabric,
    tensor_parallel, context_parallel, pipeline, hybrid_3d,
)  # fmt: skip


def losses(step: Step) -> list[float]:
    """Train, and return the loss of the whole batch at each step."""
    found = []
    for number in range(STEPS):
        loss = step(batch(number))
        dist.all_reduce(loss)
        found.append(loss.item() / WORLD)
    return found


def main() -> int:
    dist.init_process_group("nccl" if CUDA else "gloo")
    wanted = losses(single(llama()))
    worst = 0.0
    for strategy in STRATEGIES:
        if len(sys.argv) > 1 and strategy.__name__ not in sys.argv:
            continue
        found = losses(strategy(llama()))
        off = max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
        worst = max(worst, off)
        if RANK == 0:
            print(
                f"{strategy.__name__:<17} loss {found[0]:.6f} loss {found[-1]:.6f}, {off:.0e} off one process",
                flush=True,
            )
    return int(worst > 1e-5)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    os._exit(status)  # done; torch's autograd threads can abort an interpreter's teardown, now and then
