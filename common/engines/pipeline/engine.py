"""The engine of every recipe with pipeline stages: one global batch through a schedule, then one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule

from gptscale.common.engine import Batch, StepResult
from gptscale.common.engines.torch_engine import SteppedEngine, seed_dropout
from gptscale.common.measure.bubble import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Bubble,
    StageClock,
    bubble_fraction,
    order_of,
    simulate,
)
from gptscale.common.model.loss import IGNORE
from gptscale.common.model.precision import autocast
from gptscale.common.optim.stepper import Stepper
from gptscale.common.state import local

if TYPE_CHECKING:
    from gptscale.common.settings.run import Run


class TimedStage(PipelineStage):
    """torch's stage, its three computations timed."""

    clock: StageClock

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without those to itself, which a V asks for where it turns and gloo refuses."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.computing(FORWARD, self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        with self.clock.computing(BACKWARD if full_backward else INPUT, self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self.clock.computing(WEIGHT, self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class PipelineLoss:
    """The schedule's loss function: sums what the last stage computed, and scales it for backward."""

    def __init__(self, device: torch.device) -> None:
        self.total = self.to_grad = torch.zeros((), device=device)

    def __call__(self, summed: Tensor, targets: Tensor) -> Tensor:
        """`summed`: the summed loss of a micro-batch, which the last stage computed with these targets."""
        self.total += summed.detach()
        return summed * self.to_grad


class PipelineEngine(SteppedEngine):
    """Engine over the stages that this process computes, in the order of `schedule`, whose loss function is `loss`.

    pipeline: the processes of one pipeline; data: those that split the batch, None if none do. tied: where the table lives
    on two processes, the parameter here and the group of the two, which must sum its gradient.
    """

    def __init__(
        self,
        run: Run,
        stages: Sequence[TimedStage],
        schedule: _PipelineSchedule,
        loss: PipelineLoss,
        optimizer: Stepper,
        *,
        pipeline: dist.ProcessGroup,
        data: dist.ProcessGroup | None = None,
        tied: tuple[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        self.run, self.stages, self.schedule, self.loss, self.optimizer = run, stages, schedule, loss, optimizer
        self.pipeline, self.group, self.tied = pipeline, data, tied
        self.data_rank = dist.get_rank(data) if data else 0
        self.data_size = dist.get_world_size(data) if data else 1
        self.first, self.last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        self.clock = StageClock(run.world.device)
        for stage in stages:
            stage.clock = self.clock
        n_stages = stages[0].num_stages
        self.theory = bubble_fraction(simulate(order_of(schedule, n_stages, run.batch.grad_accum_steps), n_stages))

    @property
    def model(self) -> nn.Module:
        """The modules of this process's stages."""
        return nn.ModuleList(stage.submod for stage in self.stages)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step on this pipeline's share of a global batch."""
        seed_dropout(self.run.config.seed, batch.step, self.run.world.rank)
        n_targets = (batch.targets != IGNORE).sum()
        if self.group is not None:
            dist.all_reduce(n_targets, group=self.group)
        # Gradients are averaged over data ranks, the loss is a mean over all of their tokens: data_size makes one the other.
        self.loss.to_grad = self.optimizer.scale.to(n_targets.device) * self.data_size / n_targets
        with self.clock.step():
            total = self._through(batch)
        if self.tied is not None:
            weight, two = self.tied
            assert weight.grad is not None
            dist.all_reduce(local(weight.grad), group=two)
        rank_losses = self._of_data_ranks(total / n_targets)
        loss = rank_losses.sum()
        return StepResult(loss, self.optimizer.step(lr, loss), rank_losses)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> Tensor:
        """Mean loss over the global batch; micro-batches one after another through all stages."""
        for stage in self.stages:
            stage.submod.eval()
        self.loss.total = torch.zeros((), device=batch.inputs.device)
        size = self.run.batch.micro_batch_size
        for inputs, targets in zip(batch.inputs.split(size), batch.targets.split(size), strict=True):
            x = inputs
            for stage in self.stages:
                x = self._forward(stage, x, targets)
        dist.all_reduce(self.loss.total, group=self.pipeline)
        n_targets = (batch.targets != IGNORE).sum()
        return self._of_data_ranks(self.loss.total).sum() / self._of_data_ranks(n_targets).sum()

    def bubble(self) -> Bubble:
        """Measured by the stages' clock."""
        clock = self.clock
        clock.read()
        return Bubble(self.theory, tuple(clock.busy_s), tuple(clock.span_s), clock.spans, clock.began_at)

    def _through(self, batch: Batch) -> Tensor:
        """Every micro-batch through every stage, and back; the summed loss of all, (), on each process of the pipeline."""
        for stage in self.stages:
            stage.submod.train()
        self.loss.total = torch.zeros((), device=batch.inputs.device)
        inputs = (batch.inputs,) if self.first else ()
        targets: Any = {"target": batch.targets, "targets": batch.targets} if self.last else {}
        with autocast(self.run.config.precision, batch.inputs.device):
            self.schedule.step(*inputs, **targets, return_outputs=False)
        dist.all_reduce(self.loss.total, group=self.pipeline)  # zero but on the process of the last stage
        return self.loss.total

    def _forward(self, stage: TimedStage, x: Tensor, targets: Tensor) -> Tensor:
        """One stage's forward of one micro-batch; `x` is the output of the stage before, if that is here too."""
        before, behind = (stage.stage_index_to_group_rank.get(stage.stage_index + d) for d in (-1, 1))
        if before not in (None, stage.group_rank):
            assert stage.inputs_meta is not None
            x = torch.empty_like(stage.inputs_meta[0], device=x.device)
            dist.recv(x, group=self.pipeline, group_src=before)
        with autocast(self.run.config.precision, x.device):
            y: Tensor = stage.submod(x, targets)
        if stage.is_last:
            self.loss.total += y
        elif behind != stage.group_rank:
            dist.send(y.contiguous(), group=self.pipeline, group_dst=behind)
        return y

    def _of_data_ranks(self, value: Tensor) -> Tensor:
        """Every data rank's scalar, (data_size,)."""
        if self.group is None:
            return value.view(1)
        gathered = value.new_empty(self.data_size)
        dist.all_gather_into_tensor(gathered, value.view(1), group=self.group)
        return gathered
