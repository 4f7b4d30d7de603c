"""The engine of every recipe with pipeline stages, which sends a global batch through a schedule and then steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
from gptscale.common.model.precision import autocast
from gptscale.common.optim.stepper import Stepper
from gptscale.common.process.progress import progress
from gptscale.common.settings.run import Run
from gptscale.common.state import local


class TimedStage(PipelineStage):
    """A stage of torch's pipeline whose computations are timed."""

    clock: StageClock

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Its input on the meta device, which torch keeps under another name in each release.
        (self.example,) = arguments[4]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the first transfers, leaving out those to this process itself. torch 2.15 leaves them out by itself."""
        # At its turning point a V-shaped schedule sends to its own process, which gloo refuses.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]  # type: ignore[misc]

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
    """The schedule's loss function, which adds up the loss of the micro-batches and scales each for its backward.

    total: the summed loss of the micro-batches so far. grad_factor: what a micro-batch's loss is multiplied by.
    """

    def __init__(self, device: torch.device) -> None:
        # Two tensors, never one under two names: `total` is added to in place, and must not change `grad_factor`.
        self.total = torch.zeros((), device=device)
        self.grad_factor = torch.zeros((), device=device)

    def __call__(self, summed: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that backward starts from, where `summed` is the last stage's summed loss of a micro-batch."""
        self.total += summed.detach()
        return summed * self.grad_factor


class PipelineEngine(SteppedEngine):
    """Engine over the stages that this process computes, in the order of `schedule`, whose loss function is `loss`.

    pipeline: the processes of one pipeline. data: the processes that split the batch, None if only this one reads it. cut: as in
    TorchEngine.
    tied: if the table lives on two processes, its parameter here and the group of the two, which must sum its gradient.
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
        cut: Callable[[Tensor], Tensor] | None = None,
        tied: tuple[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        self.run, self.stages, self.schedule, self.loss, self.optimizer = run, stages, schedule, loss, optimizer
        self.pipeline, self.tied = pipeline, tied
        self.join(data, cut)
        self.has_first = any(stage.is_first for stage in stages)
        self.clock = StageClock(run.world.device)
        for stage in stages:
            stage.clock = self.clock
        n_stages = stages[0].num_stages
        self.theory = bubble_fraction(simulate(order_of(schedule, n_stages, run.batch.grad_accum_steps), n_stages))

    @property
    def model(self) -> nn.Module:
        return nn.ModuleList(stage.submod for stage in self.stages)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        progress.at("forward")
        seed_dropout(self.run.config.seed, batch.step, self.dropout_rank)
        batch = self.own_tokens(batch)
        n_targets = self.count_targets(batch)
        # Gradients are averaged over the data ranks, but the loss is a mean over the tokens of all of them. The factor turns that
        # average into a sum.
        self.loss.grad_factor = self.optimizer.scale.to(n_targets.device) * self.shares / n_targets
        with self.clock.step():
            total = self._run_schedule(batch)
        progress.at("optimizer")
        if self.tied is not None:
            weight, both_ends = self.tied
            assert weight.grad is not None
            dist.all_reduce(local(weight.grad), group=both_ends)
        rank_losses = self.gather(total / n_targets)()
        loss = rank_losses.sum()
        return StepResult(loss, self.optimizer_step(lr, loss), rank_losses)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> Tensor:
        """Send the micro-batches through all stages one after another."""
        batch = self.own_tokens(batch)
        self.model.eval()
        self.loss.total = torch.zeros((), device=batch.inputs.device)
        for inputs, targets in self.micro_batches(batch):
            x = inputs
            for stage in self.stages:
                x = self._forward(stage, x, self._given(inputs, targets))
        dist.all_reduce(self.loss.total, group=self.pipeline)
        return self.gather(self.loss.total)().sum() / self.count_targets(batch)

    def bubble(self) -> Bubble:
        return self.clock.bubble(self.theory)

    def _run_schedule(self, batch: Batch) -> Tensor:
        """Run forward and backward of all micro-batches, and return their summed loss, (), on every process of the pipeline."""
        self.model.train()
        self.loss.total = torch.zeros((), device=batch.inputs.device)
        first, given = [batch.inputs] if self.has_first else [], self._given(batch.inputs, batch.targets)
        with autocast(self.run.config.precision, batch.inputs.device):
            self.schedule.step(*first, target=batch.targets, **given, return_outputs=False)
        # Only the process of the last stage has added to it. This gives the sum to the others.
        dist.all_reduce(self.loss.total, group=self.pipeline)
        return self.loss.total

    def _given(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return what each stage takes beside the output of the stage before."""
        return {"targets": targets} | ({"inputs": inputs} if self.run.config.is_own else {})

    def _forward(self, stage: TimedStage, x: Tensor, given: dict[str, Any]) -> Tensor:
        """Run the forward of one stage for one micro-batch.

        x: the output of the stage before if this process has that stage; otherwise it is received from its process.
        """
        rank_before, rank_after = (stage.stage_index_to_group_rank.get(stage.stage_index + d) for d in (-1, 1))
        if rank_before not in (None, stage.group_rank):
            x = torch.empty_like(stage.example, device=x.device)
            dist.recv(x, group=self.pipeline, group_src=rank_before)
        with autocast(self.run.config.precision, x.device):
            y: Tensor = stage.submod(x, **given)
        if stage.is_last:
            self.loss.total += y
        elif rank_after != stage.group_rank:
            dist.send(y.contiguous(), group=self.pipeline, group_dst=rank_after)
        return y
