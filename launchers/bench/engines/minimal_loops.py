"""Each engine's own minimal training loop, as its documentation has it, for `gptscale bench engines` to compare with.

Only the model that is handed in is this package's: any module whose forward(inputs, targets) is the summed loss of a
micro-batch. A setup returns a function that takes one optimizer step: forward, backward, clip to norm 1, step, zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

LR = 1e-3
Step = Callable[[Tensor, Tensor], Tensor]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in two groups, of which matrices decay and vectors do not: the same work as ours."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def ddp(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up torch's DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain(wrapped, torch.optim.AdamW(groups(wrapped), lr=LR, fused=True))


def fsdp(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up torch's fully_shard."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module)
    fully_shard(model)
    return _plain(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))


def zero(stage: int, offload: bool = False) -> Callable[[nn.Module, type[nn.Module]], Step]:
    """Return a setup with DeepSpeed's initialize, backward and step."""

    def setup(model: nn.Module, block: type[nn.Module]) -> Step:
        import deepspeed

        stages: dict[str, Any] = {"stage": stage, "reduce_bucket_size": sum(p.numel() for p in model.parameters()) // 8}
        if offload:
            stages["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": stages,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if stage == 3:
            gpt: Any = model
            deepspeed.zero.register_external_parameter(gpt, gpt.wte.weight)
        kind: Any = deepspeed.ops.adam.DeepSpeedCPUAdam if offload else torch.optim.AdamW
        optimizer = kind(groups(model), lr=LR) if offload else kind(groups(model), lr=LR, fused=True)
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = engine(inputs, targets) / targets.numel()
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return setup


def fairscale_sdp(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up fairscale's OSS and ShardedDataParallel, whose own zero_grad and clipping must be used."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(groups(model), optim=torch.optim.AdamW, lr=LR, fused=True)
    wrapped = ShardedDataParallel(model, optimizer)
    return _plain(wrapped, optimizer, clip=optimizer.clip_grad_norm, zero_grad=wrapped.zero_grad)


def accelerate_fsdp(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up Accelerate with its FSDP plugin, on the path that it takes for GPUs."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[block.__name__]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))
    return _plain(prepared, optimizer, clip=lambda norm: accelerator.clip_grad_norm_(prepared.parameters(), norm))


def lightning_fabric(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up Fabric with its DDP strategy."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = Fabric(
        accelerator=device, strategy="ddp", devices=dist.get_world_size(), plugins=[TorchElasticEnvironment()]
    )
    fabric.launch()
    module_and_optimizer: Any = fabric.setup(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))
    wrapped, optimizer = module_and_optimizer
    return _plain(wrapped, optimizer, clip=lambda norm: fabric.clip_gradients(wrapped, optimizer, max_norm=norm))


def tensor_parallel(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up torch's parallelize_module with sequence parallelism, and its loss_parallel."""
    return _tensors_and_data(model, block, tp_size=dist.get_world_size())


def hybrid_3d(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up the same over two processes, and fully_shard over the rest."""
    return _tensors_and_data(model, block, tp_size=2)


def _tensors_and_data(model: nn.Module, block: type[nn.Module], tp_size: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    class MinimalLoss(nn.Module):
        def forward(self, x: Any, weight: Any, targets: Tensor) -> Tensor:
            logits = F.linear(x.redistribute(placements=[Replicate()]), weight)
            loss: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            return loss

    sizes = (dist.get_world_size() // tp_size, tp_size)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", sizes, mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "ln_f": SequenceParallel(),
    }
    for name, module in model.named_modules():
        if isinstance(module, block):
            plan |= {f"{name}.{norm}": SequenceParallel() for norm in ("ln_1", "ln_2")}
            for part, matrix in (("attn", "qkv"), ("mlp", "fc")):
                plan[f"{name}.{part}"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
                plan[f"{name}.{part}.{matrix}"] = ColwiseParallel()
                plan[f"{name}.{part}.proj"] = RowwiseParallel(output_layouts=Shard(1))
    model.loss = MinimalLoss()
    parallelize_module(model, mesh["tp"], plan)
    if sizes[0] > 1:
        for module in list(model.modules()):
            if isinstance(module, block):
                fully_shard(module, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    plain = _plain(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss: Any = plain(inputs, targets)
        local: Tensor = getattr(loss, "to_local", lambda: loss)()
        return local

    return step


def pipeline(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up torch's pipelining with 1F1B.

    The token table lies on both ends. Its gradient and the norm are summed by hand.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    gpt: Any = model

    class MinimalStage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            n = len(gpt.blocks) // size
            self.blocks = nn.ModuleList(gpt.blocks[rank * n : (rank + 1) * n])
            if rank in (0, size - 1):
                self.wte = gpt.wte
            if rank == 0:
                self.wpe = gpt.wpe
            if rank == size - 1:
                self.ln_f, self.loss = gpt.ln_f, gpt.loss

        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            if rank == 0:
                x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
            for layer in self.blocks:
                x = layer(x)
            y: Tensor = self.loss(self.ln_f(x), self.wte.weight, targets) if rank == size - 1 else x
            return y

    own = MinimalStage()
    device = next(own.parameters()).device
    stage = PipelineStage(own, rank, size, device)
    schedule = Schedule1F1B(stage, 2 * size, loss_fn=lambda loss, targets: loss, scale_grads=False)
    optimizer = torch.optim.AdamW(groups(own), lr=LR, fused=True)
    ends = dist.new_group([0, size - 1])
    parameters = list(own.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = {"target": targets, "targets": targets} if rank == size - 1 else {}
        schedule.step(*([inputs] if rank == 0 else []), **last, losses=losses, return_outputs=False)
        if rank in (0, size - 1):
            dist.all_reduce(own.wte.weight.grad, group=ends)
        grads: list[Any] = [p.grad for p in parameters]
        torch._foreach_div_(grads, float(targets.numel()))
        squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        if rank == size - 1:
            squares -= own.wte.weight.grad.square().sum()
        dist.all_reduce(squares)
        torch._foreach_mul_(grads, (1 / (squares.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).sum() / targets.numel() if losses else squares.new_zeros(())
        dist.all_reduce(loss)
        return loss.detach()

    return step


def _plain(
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[float], Any] | None = None,
    zero_grad: Callable[[], Any] | None = None,
) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        if clip:
            clip(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        (zero_grad or optimizer.zero_grad)()
        detached: Tensor = loss.detach()
        return detached

    return step


SETUPS: dict[str, Callable[[nn.Module, type[nn.Module]], Step]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero_offload": zero(2, offload=True),
    "fairscale_sdp": fairscale_sdp,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "hybrid_3d": hybrid_3d,
    "accelerate_fsdp": accelerate_fsdp,
    "lightning_fabric": lightning_fabric,
}
