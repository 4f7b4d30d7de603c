"""From a run to its pipeline: this process's stages, what they pass on, and the engine over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gptscale.common.engines.pipeline.engine import PipelineEngine, PipelineLoss, TimedStage
from gptscale.common.engines.pipeline.plan import V_SHAPED, PipelineOptions, stage_indices, stage_sizes
from gptscale.common.engines.pipeline.stages import stages_of, tied_embedding_group
from gptscale.common.model.build import meta_gpt
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.settings.run import Run

TABLE = "wte.weight"


def parts_of(run: Run, options: PipelineOptions, pp_rank: int) -> dict[int, nn.Module]:
    """This process's stages by index, on the meta device: nobody ever has the rest of the model."""
    sizes = stage_sizes(run, options)
    mine = stage_indices(options.schedule, pp_rank, run.pp_size, len(sizes))
    return dict(zip(mine, stages_of(meta_gpt(run), sizes, mine), strict=True))


def shapes_of(run: Run, n_stages: int, activation: torch.dtype) -> Callable[[int], tuple[Tensor, Tensor]]:
    """What a stage reads and leaves for one micro-batch, by its index, on the meta device: ids, activations, the summed loss.

    activation: the type of what stages pass on. Under tensor parallelism each passes its part of the sequence.
    """
    micro_batch, seq_len, tp_size = run.batch.micro_batch_size, run.seq_len, run.tp_size
    ids = torch.empty(micro_batch, seq_len, dtype=torch.int64, device="meta")
    passed = ids.new_empty(micro_batch, seq_len // tp_size, run.gpt.n_embd, dtype=activation)
    total = torch.empty((), device="meta")
    return lambda index: (ids if index == 0 else passed, total if index == n_stages - 1 else passed)


def pipeline_engine(
    run: Run,
    options: PipelineOptions,
    parts: dict[int, nn.Module],
    made: tuple[list[TimedStage], Any],
    loss: PipelineLoss,
    mesh: DeviceMesh,
    *,
    data: dist.ProcessGroup | None = None,
    copies: int = 1,
) -> PipelineEngine:
    """The engine over this process's stages and their schedule, `made`. mesh: has an axis pp, and holds the whole world.

    data: the processes that split the batch. copies: how many of the world hold each parameter alike, beside what its
    DTensor says.
    """
    parameters = {name: p for part in parts.values() for name, p in part.named_parameters()}
    ends = None if options.schedule in V_SHAPED else tied_embedding_group(mesh)  # a V ends where it begins
    held = dict.fromkeys(parameters, copies) | ({TABLE: 2 * copies} if ends else {})
    optimizer = FusedOptimizer(parameters, run.config, shards=dist.group.WORLD, copies=held)
    tied = (parameters[TABLE], ends) if ends else None
    stages, schedule = made
    return PipelineEngine(run, stages, schedule, loss, optimizer, pipeline=mesh["pp"].get_group(), data=data, tied=tied)
