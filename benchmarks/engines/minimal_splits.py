"""The minimal loops of engines that split the model itself, and the table of all minimal loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import minimal_loops as loops
from benchmarks.engines.minimal_loops import LR, Step, groups, plain_step
from gptscale.common.settings.run import Run


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
    plain = plain_step(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))

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
    ends = dist.new_group(sorted({0, size - 1}))
    parameters = list(own.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = {"target": targets, "targets": targets} if rank == size - 1 else {}
        schedule.step(*([inputs] if rank == 0 else []), **last, losses=losses, return_outputs=False)  # type: ignore[arg-type]
        if rank in (0, size - 1):
            dist.all_reduce(own.wte.weight.grad, group=ends)  # type: ignore[arg-type]
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


def colossal(run: Run) -> Step:
    """Set up Colossal-AI's booster with its hybrid plugin, over transformers' model with the policy and loss of the recipe.

    Its optimizer clips by its own norm, which the recipe replaces (common/engines/colossal/hybrid.py).
    """
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    from gptscale.common.engines.colossal.gpt2 import lazy_gpt2, policy

    options: dict[str, Any] = {"precision": "fp32", "custom_policy": policy(run.gpt), "max_norm": 1.0}
    options |= {"tp_size": run.tp_size, "pp_size": run.pp_size, "make_vocab_size_divisible_by": 1}
    if run.pp_size > 1:
        # as the recipe sets it: on a CPU upstream drops the handle of a send
        overlap = run.world.device.type == "cuda"
        options |= {"num_microbatches": run.batch.grad_accum_steps, "overlap_p2p": overlap}
    model: Any = lazy_gpt2(run)
    booster = Booster(plugin=HybridParallelPlugin(**options))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups(model), lr=LR, fused=True))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        if run.pp_size > 1:
            batch = iter([{"input_ids": inputs, "targets": targets}])
            scale = run.batch.grad_accum_steps / targets.numel()
            returned = booster.execute_pipeline(batch, model, lambda loss, _: loss * scale, optimizer, return_loss=True)
            loss = torch.zeros(()) if returned["loss"] is None else returned["loss"]
        else:
            loss = model(input_ids=inputs, targets=targets) / targets.numel()
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        detached: Tensor = loss.detach()
        return detached

    return step


SETUPS: dict[str, Callable[[nn.Module, type[nn.Module]], Step]] = {
    "ddp": loops.ddp,
    "fsdp": loops.fsdp,
    "fsdp_offload": loops.fsdp_offload,
    "zero1": loops.zero(1),
    "zero2": loops.zero(2),
    "zero3": loops.zero(3),
    "zero_offload": loops.zero(2, offload="cpu"),
    "zero_infinity": loops.zero(3, offload="nvme"),
    "fairscale_sdp": loops.fairscale_sdp,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "hybrid_3d": hybrid_3d,
    "accelerate_fsdp": loops.accelerate_fsdp,
    "lightning_fabric": loops.lightning_fabric,
}
# Recipes that build transformers' model themselves.
LIBRARY_SETUPS: dict[str, Callable[[Run], Step]] = {"colossal_tensor": colossal, "colossal_pipeline": colossal}
