"""The minimal training loop of each engine, as its documentation has it.

Only the model that is handed in is this package's: any module whose forward(inputs, targets) is the summed loss of a
micro-batch. A setup returns a function that takes one optimizer step: forward, backward, clip to norm 1, step, zero.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
    return plain_step(wrapped, torch.optim.AdamW(groups(wrapped), lr=LR, fused=True))


def fsdp(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up torch's fully_shard."""
    from torch.distributed.fsdp import OffloadPolicy

    return _fully_shard(model, block, OffloadPolicy())


def fsdp_offload(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up the same with shards and optimizer state in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _fully_shard(model.cpu(), block, CPUOffloadPolicy(pin_memory=torch.cuda.is_available()))


def _fully_shard(model: nn.Module, block: type[nn.Module], policy: Any) -> Step:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    return plain_step(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))


def zero(stage: int, offload: str = "") -> Callable[[nn.Module, type[nn.Module]], Step]:
    """Return a setup with DeepSpeed's initialize, backward and step. offload: to the `cpu`, or to files (`nvme`)."""

    def setup(model: nn.Module, block: type[nn.Module]) -> Step:
        import deepspeed

        stages: dict[str, Any] = {"stage": stage, "reduce_bucket_size": sum(p.numel() for p in model.parameters()) // 8}
        if offload:
            pin_memory = offload == "nvme" or torch.cuda.is_available()
            stages["offload_optimizer"] = {"device": offload, "pin_memory": pin_memory}
        if offload == "nvme":
            files = {"nvme_path": tempfile.mkdtemp(), "max_in_cpu": 0, "buffer_count": 8}
            longest = max(2**20, *(p.numel() // dist.get_world_size() + 1 for p in model.parameters()))
            stages["offload_param"] = {**stages["offload_optimizer"], **files, "buffer_size": longest}
            stages["offload_optimizer"]["nvme_path"] = files["nvme_path"]
            # otherwise a model runs out of those buffers
            stages["stage3_max_reuse_distance"] = 0
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
    return plain_step(wrapped, optimizer, clip=optimizer.clip_grad_norm, zero_grad=wrapped.zero_grad)


def accelerate_fsdp(model: nn.Module, block: type[nn.Module]) -> Step:
    """Set up Accelerate with its FSDP plugin, on the path that it takes for GPUs."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[block.__name__]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))
    return plain_step(prepared, optimizer, clip=lambda norm: accelerator.clip_grad_norm_(prepared.parameters(), norm))


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
    return plain_step(wrapped, optimizer, clip=lambda norm: fabric.clip_gradients(wrapped, optimizer, max_norm=norm))


def plain_step(
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[float], Any] | None = None,
    zero_grad: Callable[[], Any] | None = None,
) -> Step:
    """Return the step of forward, backward, clipping, optimizer and clearing, by a library's own functions where it has some."""

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
