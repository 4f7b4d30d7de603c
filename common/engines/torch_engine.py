"""The engine of every recipe that trains by forward, backward, step: accumulation, global loss, one optimizer step.

A strategy hands in its wrapped model, its optimizer and, where they are its own, its backward and how to hold gradient
communication back during accumulation. Nothing here knows which strategy that is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.engine import Batch, StepResult
from gptscale.common.model.compilation import CUDA_GRAPHS
from gptscale.common.model.loss import IGNORE
from gptscale.common.model.precision import autocast
from gptscale.common.optim.stepper import Stepper
from gptscale.common.state import Shard

if TYPE_CHECKING:
    from gptscale.common.measure.bubble import Bubble
    from gptscale.common.measure.offload import Offload
    from gptscale.common.settings.run import Run


class SteppedEngine:
    """What an engine whose weights and state are its Stepper's leaves to it: all of Engine but the two passes."""

    optimizer: Stepper

    def state(self) -> Iterable[Shard]:
        """The optimizer's: it knows every weight and what belongs to it."""
        return self.optimizer.state()

    def counters(self) -> dict[str, float]:
        """The optimizer's."""
        return self.optimizer.counters()

    def load_counters(self, counters: dict[str, float]) -> None:
        """The optimizer's."""
        self.optimizer.load_counters(counters)

    def offload(self) -> Offload | None:
        """The optimizer's."""
        return self.optimizer.offload()

    def bubble(self) -> Bubble | None:
        """No rank waits for a stage."""
        return None

    def close(self) -> None:
        """The optimizer's."""
        self.optimizer.close()


class TorchEngine(SteppedEngine):
    """Engine over `model`, whose forward(inputs, targets) gives the summed loss of a micro-batch.

    group: the processes that split the batch, None if none do. set_grad_sync(on): whether the next backward communicates.
    backward(loss): how the strategy wants it called. Gradients must come out as the MEAN over `group`, as in DDP.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: Stepper,
        *,
        group: dist.ProcessGroup | None = None,
        set_grad_sync: Callable[[bool], None] = lambda on: None,
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> None:
        self.run, self.model, self.optimizer, self.group = run, model, optimizer, group
        self.set_grad_sync, self.backward = set_grad_sync, backward
        self.data_rank = dist.get_rank(group) if group else 0
        self.data_size = dist.get_world_size(group) if group else 1

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step on this process's share of a global batch.

        The two small exchanges of it, of token counts and of losses, run beside a forward and a backward.
        """
        self._begin()
        seed_dropout(self.run.config.seed, batch.step, self.run.world.rank)
        self.model.train()
        micro_batches = self._micro_batches(batch)
        n_targets, counted = self._all_reduce((batch.targets != IGNORE).sum())
        loss = torch.zeros((), device=batch.inputs.device)
        for i, (inputs, targets) in enumerate(micro_batches, start=1):
            self.set_grad_sync(i == len(micro_batches))
            with autocast(self.run.config.precision, inputs.device):
                micro_loss = self.model(inputs, targets)
            loss += micro_loss.detach()
            if i == 1:
                counted()
                # Gradients are averaged over ranks, the loss is a mean over all ranks' tokens: data_size makes one the other.
                to_grad = self.optimizer.scale.to(loss.device) * self.data_size / n_targets
            if i == len(micro_batches):
                rank_losses, gathered = self._all_gather(loss / n_targets)
            self.backward(micro_loss * to_grad)
        gathered()
        loss = rank_losses.sum()
        return StepResult(loss, self.optimizer.step(lr, loss), rank_losses)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> Tensor:
        """Mean loss over the global batch."""
        self.model.eval()
        loss = torch.zeros((), device=batch.inputs.device)
        for inputs, targets in self._micro_batches(batch):
            self._begin()
            with autocast(self.run.config.precision, inputs.device):
                loss += self.model(inputs, targets)
        sums, reduced = self._all_reduce(torch.stack([loss, (batch.targets != IGNORE).sum().to(loss.dtype)]))
        reduced()
        return sums[0] / sums[1]

    def _begin(self) -> None:
        """Give CUDA graphs, if blocks are compiled to them, their memory back: whatever they returned before is done with.

        Between micro-batches of a step it is not: gradients of weights, which are outputs of graphs, are still being summed.
        """
        if self.run.config.compile_mode in CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()

    def _micro_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        size = self.run.batch.micro_batch_size
        return list(zip(batch.inputs.split(size), batch.targets.split(size), strict=True))

    def _all_reduce(self, value: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """`value` summed over the group, in place, once the function beside it has been called."""
        if self.group is None:
            return value, lambda: None
        return value, dist.all_reduce(value, group=self.group, async_op=True).wait

    def _all_gather(self, value: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """Every rank's scalar, (data_size,), likewise."""
        gathered = value.new_empty(self.data_size)
        if self.group is None:
            return gathered.copy_(value), lambda: None
        return gathered, dist.all_gather_into_tensor(gathered, value.view(1), group=self.group, async_op=True).wait


def holding_back(no_sync: Callable[[], AbstractContextManager[object]]) -> Callable[[bool], None]:
    """`set_grad_sync` from a library's context manager `no_sync`: entered while gradients are to stay where they are."""
    entered = ExitStack()

    def set_grad_sync(on: bool) -> None:
        entered.close()
        if not on:
            entered.enter_context(no_sync())

    return set_grad_sync


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank): nothing to save, and a resumed run draws the same masks.

    Every rank of the world has a stream of its own. Data ranks must, and so must tensor and pipeline ranks, because no two of
    them ever drop the same activations: attention drops in each rank's own heads, the rest in its own part of the sequence.
    """
    torch.manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))
