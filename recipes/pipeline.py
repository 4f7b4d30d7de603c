"""Pipeline parallelism: the layers are cut into stages, and micro-batches pass from stage to stage.

What is sharded        the layers: each of p devices holds v stages (v = 1, or more where a schedule interleaves). The token
                       table lives twice, before the first block and, as the head, behind the last
What is communicated   activations to the next stage and their gradients back: 2 x B T h b bytes per boundary between stages and
                       micro-batch of B x T tokens (b bytes each), p v - 1 boundaries; once a step the gradient of the table,
                       4 V h bytes, summed between the two devices that hold it. The least of all strategies
Memory per device      16 n bytes for the n parameters of its stages + the activations of micro-batches in flight (all m of
                       them under GPipe, at most p under 1F1B) + torch's buffers for transfers, up to 3 v m B T h b bytes
Idle                   (p-1)/(m+p-1) of the time under GPipe and 1F1B, (p-1)/(v m+p-1) under Interleaved1F1B; zero-bubble
                       schedules fill that with the half of backward that only weights wait for
Wins                   across nodes and on slow links, with many micro-batches; composes with every other strategy
Loses                  with few micro-batches, or layers that do not divide evenly: the head weighs as much as several blocks
Source                 Huang et al. 2019 (arXiv 1811.06965); Narayanan et al. 2021 (2104.04473); Qi et al. 2024 (2401.10241)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gptscale.common.engines.pipeline.stages import SCHEDULES, Schedule, check_stages, describe_stages, micro_batches
from gptscale.common.recipe_config import RecipeConfig

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage

    from gptscale.common.engines.pipeline.chain_stage import LossOf
    from gptscale.common.engines.pipeline.engine import PipelineEngine
    from gptscale.common.settings.run import Run


@dataclass(frozen=True)
class PipelineConfig(RecipeConfig):
    """Options of the pipeline, whose schedules have the names of torch.distributed.pipelining."""

    formula: ClassVar[str] = "16 n"
    schedule: Schedule = "1F1B"
    """GPipe | 1F1B | Interleaved1F1B | LoopedBFS | InterleavedZeroBubble | ZBVZeroBubble | DualPipeV."""
    stages_per_rank: int = 0
    """Stages that each process computes; 0 takes 1 for GPipe and 1F1B, 2 for the others."""
    layers_per_stage: str = "balanced"
    """Blocks of each stage, such as 13,13,12,10; balanced makes the heaviest stage as light as can be, the head counted."""

    def grad_accum_steps(self, sequences: int, pp_size: int) -> int | None:
        return micro_batches(self, sequences, pp_size)

    @classmethod
    def ways(cls, nproc: int) -> list[tuple[str, ...]]:
        """Return every schedule."""
        return [("--schedule", schedule) for schedule in SCHEDULES]

    def check(self, run: Run) -> None:
        check_stages(run, self)

    def describe(self, run: Run) -> list[str]:
        return describe_stages(run, self)


def shard(
    parts: Mapping[int, nn.Module],
    n_stages: int,
    mesh: DeviceMesh,
    schedule: str,
    n_microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    shapes: Callable[[int], tuple[Tensor, Tensor]],
    stage_class: type[PipelineStage] | None = None,
) -> tuple[list[Any], Any]:
    """Return the stages that this process computes, and the schedule that runs them and sums gradients over micro-batches.

    parts: this process's modules by stage index. mesh: 1-D, the pipeline. loss_fn(output of the last stage, targets).
    shapes(index): the input and the output of a stage on the meta device, so that no batch must be run to find out.
    """
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    stages, stage_type = [], stage_class or PipelineStage
    for index, part in parts.items():
        inputs, outputs = shapes(index)
        # The group by its name: since 2.14 torch takes the shapes of gradients before it.
        stages.append(stage_type(part, index, n_stages, device, (inputs,), (outputs,), group=mesh.get_group()))
    kind: Any = get_schedule_class(schedule)
    multi = issubclass(kind, PipelineScheduleMulti)
    return stages, kind(stages if multi else stages[0], n_microbatches, loss_fn=loss_fn, scale_grads=False)


def shard_chain(
    model: nn.Module,
    block_class: type[nn.Module],
    loss_of: LossOf,
    sample: tuple[Tensor, Tensor],
    mesh: DeviceMesh,
    m: int,
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """Return this process's stage of a model whose blocks are a chain, and what runs a batch in m micro-batches by 1F1B.

    loss_of(model, inputs, targets): the mean loss. sample: inputs and targets of a micro-batch. What runs a batch takes both,
    leaves the gradients in the stages, and returns the mean loss. Raises NoChainError.
    """
    from gptscale.common.engines.pipeline.chain_stage import gradients, stage_of_loop

    stage, shapes = stage_of_loop(model, block_class, loss_of, sample, mesh)
    _, schedule = shard({mesh.get_local_rank(): stage}, mesh.size(), mesh, "1F1B", m, lambda loss, _: loss / m, shapes)
    return stage, partial(gradients, schedule, mesh)


def build(run: Run, config: PipelineConfig) -> PipelineEngine:
    """Build this rank's stages, fill them with weights, and put a schedule over them."""
    from torch.distributed.device_mesh import init_device_mesh

    from gptscale.common.engines.pipeline.build import parts_of, pipeline_engine
    from gptscale.common.model.build import materialise

    mesh = init_device_mesh(run.world.device.type, (run.world.world_size,), mesh_dim_names=("pp",))
    parts = parts_of(run, config, mesh.get_local_rank())
    for part in parts.values():
        materialise(part, run, run.world.device)
    return pipeline_engine(run, config, parts, shard, mesh)


if __name__ == "__main__":
    from gptscale.launchers.run.worker import run_recipe

    run_recipe("pipeline")
