"""Data, tensor and pipeline parallelism on one mesh: d x t x p devices, each strategy where its links are.

What is sharded        the layers over p (pipeline), every matrix of a stage over t (tensor_parallel), the batch over d; and,
                       with --data-parallel fsdp, what is left of every parameter over d too
What is communicated   the sum of the three, each smaller: tensor transfers are for one stage's layers, data transfers for
                       1/(t p) of the gradients, once a step. Innermost, on the fastest links, is t; outermost is p
Memory per device      16 N / (t p d) bytes under fsdp, 16 N / (t p) under ddp, with what tensor_parallel and pipeline keep
                       whole or twice; activations / t, of the micro-batches in flight
Wins                   when one node cannot hold the model, or d alone would need too large a batch: t inside the node, p
                       between nodes, d over the rest
Loses                  to any one strategy that fits alone
Source                 Narayanan et al. 2021 (arXiv 2104.04473), section 3; Liang et al. 2024 (torchtitan, 2410.06511)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gptscale.common.engine import Engine
from gptscale.common.engines.pipeline.build import parts_of, pipeline_engine, shapes_of
from gptscale.common.engines.pipeline.engine import PipelineLoss, TimedStage
from gptscale.common.engines.pipeline.plan import SPLIT_BACKWARD, V_SHAPED, describe_stages, stage_sizes
from gptscale.common.engines.tensor_parallel import check_tp
from gptscale.common.engines.torch_engine import TorchEngine
from gptscale.common.errors import ConfigError
from gptscale.common.model.build import materialise, meta_gpt
from gptscale.common.model.gpt import Block
from gptscale.common.model.precision import DTYPES
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.settings.checks import refuse_changed
from gptscale.common.settings.run import Run
from gptscale.recipes.pipeline import PipelineConfig
from gptscale.recipes.pipeline import shard as schedule_of
from gptscale.recipes.tensor_parallel import apply_tp


@dataclass(frozen=True)
class HybridConfig(PipelineConfig):
    """The pipeline's options, and how the batch is split; sizes are --tp-size and --pp-size, what is left splits the batch."""

    data_parallel: Literal["fsdp", "ddp"] = "fsdp"
    """fsdp cuts parameters over the data ranks; ddp keeps them whole there."""

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Every pair of axes."""
        if nproc < 4 or nproc % 2:
            return [()]
        tp, pp = ("--tp-size", "2"), ("--pp-size", "2")
        return [tp, pp, tp + pp, (*tp, "--data-parallel", "ddp")]

    def check(self, run: Run) -> None:
        """ConfigError unless the sizes fit the model and the batch."""
        check_tp(run)
        if run.pp_size == 1:
            of_stages = [f.name for f in dataclasses.fields(PipelineConfig)]
            refuse_changed(self, of_stages, "there is no pipeline in this mesh", "leave it out, or use --pp-size 2")
            return
        if self.schedule in V_SHAPED:
            raise ConfigError(
                f"{self.schedule} shares the table between two modules of a process, which neither DTensor nor FSDP can cut",
                "in --schedule",
                "use 1F1B, Interleaved1F1B or InterleavedZeroBubble, or recipe pipeline",
            )
        if self.schedule in SPLIT_BACKWARD and run.batch.dp_size > 1:
            raise ConfigError(
                f"{self.schedule} computes gradients of weights by itself, past fully_shard, which would not sum them",
                "in --schedule",
                "use 1F1B or Interleaved1F1B, or no data ranks: tp_size x pp_size = world",
            )
        super().check(run)

    def describe(self, run: Run) -> list[str]:
        """The mesh, and the stages if there are any."""
        mesh = f"mesh     pp {run.pp_size} x dp {run.batch.dp_size} ({self.data_parallel}) x tp {run.tp_size}"
        return [mesh, *(describe_stages(run, self) if run.pp_size > 1 else [])]


def shard(part: nn.Module, block_class: type[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype) -> FSDPModule:
    """Cut each block of a stage, then what is left, over the data ranks: `mesh` is 1-D (FSDP) or 2-D (replicas x 1: DDP)."""
    policy: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32)}
    for module in list(part.modules()):
        if isinstance(module, block_class):
            fully_shard(module, **policy)
    root: FSDPModule = fully_shard(part, reshard_after_forward=False, **policy)
    return root


def parallelize(part: nn.Module, run: Run, config: HybridConfig, mesh: DeviceMesh) -> None:
    """In this order: the stage was cut out, its checkpointing and compilation set; now tensors, then data, then memory."""
    if mesh["tp"].size() > 1:
        apply_tp(part, run.gpt, mesh["tp"])
    if run.batch.dp_size > 1:
        data = mesh["shard"] if config.data_parallel == "fsdp" else mesh["replicate", "shard"]
        shard(part, Block, data, DTYPES[run.config.precision])
    materialise(part, run, run.world.device)


def build(run: Run, config: HybridConfig) -> Engine:
    """Mesh, stages, each made parallel, and the engine over them."""
    c, dp_size = run.config, run.batch.dp_size
    replicas, shards = (1, dp_size) if config.data_parallel == "fsdp" else (dp_size, 1)
    sizes, names = (run.pp_size, replicas, shards, run.tp_size), ("pp", "replicate", "shard", "tp")
    mesh = init_device_mesh(run.world.device.type, sizes, mesh_dim_names=names)
    data = mesh["shard" if config.data_parallel == "fsdp" else "replicate"].get_group() if dp_size > 1 else None
    if run.pp_size == 1:
        model: Any = meta_gpt(run)
        parallelize(model, run, config, mesh)
        optimizer = FusedOptimizer(dict(model.named_parameters()), c, shards=dist.group.WORLD)
        return TorchEngine(run, model, optimizer, group=data)
    parts = parts_of(run, config, mesh["pp"].get_local_rank())
    for part in parts.values():
        parallelize(part, run, config, mesh)
    loss, n_stages = PipelineLoss(run.world.device), len(stage_sizes(run, config))
    shapes = shapes_of(run, n_stages, DTYPES[c.precision] if dp_size > 1 else torch.float32)
    made = schedule_of(
        parts, n_stages, mesh["pp"], config.schedule, run.batch.grad_accum_steps, loss, shapes, TimedStage
    )
    return pipeline_engine(run, config, parts, made, loss, mesh, data=data)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("hybrid_3d")
