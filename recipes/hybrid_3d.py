"""Data, tensor and pipeline parallelism on one mesh of d x t x p devices, and c for each sequence if asked to.

What is sharded        the layers over p (pipeline), every matrix of a stage over t (tensor_parallel), the batch over d; with
                       --data-parallel fsdp also what remains of every parameter, over d; each sequence over c (context_parallel)
What is communicated   the sum of the three, each smaller: tensor transfers for one stage's layers only, data transfers for
                       1/(t p) of the gradients, once a step (fsdp without stages: per micro-batch). t is innermost, p outermost
Memory per device      16 n / (d c) bytes under fsdp, 16 n under ddp, n = N / (t p) with what tensor_parallel and pipeline keep
                       whole or twice; activations / (t c), of the micro-batches in flight
Wins                   when one node cannot hold the model, or d alone would need too large a batch: t inside the node, p
                       between nodes, d over the rest
Loses                  to any one strategy that fits alone
Source                 Narayanan et al. 2021 (arXiv 2104.04473), section 3; Liang et al. 2024 (torchtitan, 2410.06511)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from gptscale.common.engines.pipeline.stages import SPLIT_BACKWARD, V_SHAPED, describe_stages
from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import refuse_changed
from gptscale.recipes.pipeline import PipelineConfig
from gptscale.recipes.pipeline import shard as schedule_of
from gptscale.recipes.tensor_parallel import TensorPlanConfig, apply_tp

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from gptscale.common.engine import Engine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class HybridConfig(PipelineConfig, TensorPlanConfig):
    """Options of the pipeline, and how the ranks beside --tp-size, --cp-size and --pp-size split the batch."""

    data_parallel: Literal["fsdp", "ddp"] = "fsdp"
    """fsdp cuts parameters over the data ranks; ddp keeps them whole there."""
    cp_style: Literal["ring", "ulysses"] = "ring"
    """How ranks of a sequence attend to all of it, as in context_parallel: ring | ulysses."""

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return every pair of axes."""
        tp, cp, pp = ((f"--{axis}-size", "2") for axis in ("tp", "cp", "pp"))
        ways = [tp, pp, tp + pp, (*tp, "--data-parallel", "ddp"), cp + pp, (*cp, *tp, "--cp-style", "ulysses")]
        return ways if nproc >= 4 and nproc % 2 == 0 else [()]

    def state_formula(self, run: Run) -> str:
        return "16 n / (d c)" if self.data_parallel == "fsdp" else "16 n"

    def check(self, run: Run) -> None:
        from gptscale.common.engines.context_parallel import check_cp
        from gptscale.common.engines.tensor_parallel import check_tp

        check_tp(run, self.tp_plan)
        check_cp(run, self.cp_style)
        if run.pp_size == 1:
            of_stages = [f.name for f in fields(PipelineConfig)]
            refuse_changed(self, of_stages, "there is no pipeline in this mesh", "leave it out, or use --pp-size 2")
            return
        if self.schedule in V_SHAPED:
            what = "shares the table between two modules of a process, which neither DTensor nor FSDP can cut"
            fix = "use 1F1B, Interleaved1F1B or InterleavedZeroBubble, or recipe pipeline"
            raise ConfigError(f"{self.schedule} {what}", "in --schedule", fix)
        if self.schedule in SPLIT_BACKWARD and run.split_size > 1:
            what = "computes gradients of weights by itself, past fully_shard, which would not sum them"
            fix = "use 1F1B or Interleaved1F1B, or no data ranks: tp_size x pp_size = world"
            raise ConfigError(f"{self.schedule} {what}", "in --schedule", fix)
        super().check(run)

    def describe(self, run: Run) -> list[str]:
        data = f"dp {run.batch.dp_size} ({self.data_parallel})" + f" x cp {run.cp_size}" * (run.cp_size > 1)
        mesh = f"mesh     pp {run.pp_size} x {data} x tp {run.tp_size}"
        return [mesh, *(describe_stages(run, self) if run.pp_size > 1 else [])]


def shard(part: nn.Module, block_class: type[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype) -> FSDPModule:
    """Cut each block of a stage, then what remains, over `mesh`: 1-D for FSDP, 2-D of replicas x 1 for DDP."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32)}
    for block in [module for module in part.modules() if isinstance(module, block_class)]:
        fully_shard(block, **policy)
    return fully_shard(part, reshard_after_forward=False, **policy)


def parallelize(part: Any, run: Run, config: HybridConfig, mesh: DeviceMesh) -> None:
    """Cut a stage over tensor ranks, then over data ranks and those of a sequence, and only then give it memory."""
    from gptscale.common.model.build import materialise
    from gptscale.common.model.precision import DTYPES

    if mesh["tp"].size() > 1:
        apply_tp(part, run.gpt, mesh["tp"], config.tp_plan)
    if run.split_size > 1:
        data = mesh["shard"] if config.data_parallel == "fsdp" else mesh["replicate", "shard"]
        shard(part, part.block, data, DTYPES[run.config.precision])
    materialise(part, run, run.world.device)


def build(run: Run, config: HybridConfig) -> Engine:
    """Build the mesh and this rank's stages, make each stage parallel, and put the engine over them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gptscale.common.engines.pipeline.build import parts_of, pipeline_engine
    from gptscale.common.engines.torch_engine import TorchEngine
    from gptscale.common.model.build import meta_gpt
    from gptscale.common.model.precision import DTYPES
    from gptscale.common.optim.fused import FusedOptimizer
    from gptscale.recipes.context_parallel import apply_cp

    c, dp_size, kind = run.config, run.split_size, run.world.device.type
    replicas, shards = (1, dp_size) if config.data_parallel == "fsdp" else (dp_size, 1)
    sizes = {"pp": run.pp_size, "replicate": replicas, "shard": shards, "tp": run.tp_size}
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = mesh["shard" if config.data_parallel == "fsdp" else "replicate"].get_group() if dp_size > 1 else None
    if run.pp_size == 1:
        model: Any = meta_gpt(run)
        cut = apply_cp(model, run, config.cp_style)
        parallelize(model, run, config, mesh)
        optimizer = FusedOptimizer(dict(model.named_parameters()), c, shards=dist.group.WORLD)

        def set_grad_sync(on: bool) -> None:
            # Replicas sum over micro-batches first. Shards take the sum of each.
            if dp_size > 1 and config.data_parallel == "ddp":
                model.set_requires_gradient_sync(on)
                model.set_is_last_backward(on)

        return TorchEngine(run, model, optimizer, group=data, cut=cut, set_grad_sync=set_grad_sync)
    parts = parts_of(run, config, mesh["pp"].get_local_rank())
    cut = apply_cp(torch.nn.ModuleList(parts.values()), run, config.cp_style)
    for part in parts.values():
        parallelize(part, run, config, mesh)
    activation = DTYPES[c.precision] if dp_size > 1 else torch.float32
    return pipeline_engine(run, config, parts, schedule_of, mesh, activation=activation, data=data, cut=cut)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("hybrid_3d")
