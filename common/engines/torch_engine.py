"""The engine of every recipe that trains by forward, backward, step: accumulation, global loss, one optimizer step.

A strategy passes in its wrapped model and its optimizer. If it has a backward of its own, or a way to hold gradient
communication back during accumulation, it passes these too. Nothing here knows which strategy it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from gptscale.common.engine import Batch, Engine, StepResult
from gptscale.common.measure.live_state import LiveState, Offload, live_state
from gptscale.common.model.loss import IGNORE
from gptscale.common.model.precision import autocast
from gptscale.common.optim.stepper import Stepper
from gptscale.common.process.progress import progress
from gptscale.common.settings.run import Run
from gptscale.common.settings.run_config import CUDA_GRAPHS
from gptscale.common.state import Shard

# Steps in which the state is measured, of which the last counts: buckets find their places after the first.
MEASURED_STEPS = 2


class SteppedEngine(Engine):
    """Base of an engine whose Stepper holds the weights and all state, so that only the two passes remain to be written."""

    run: Run
    optimizer: Stepper
    group: dist.ProcessGroup | None
    _live_state: LiveState | None = None
    _steps_measured = 0

    def join(self, group: dist.ProcessGroup | None, cut: Callable[[Tensor], Tensor] | None) -> None:
        """Note the processes that split the batch. Those that share a sequence are neighbours. cut: as in TorchEngine."""
        self.group, self.cut_tokens = group, cut
        rank, self.shares = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self.data_rank, self.data_size = rank // self.run.cp_size, self.shares // self.run.cp_size

    @property
    def dropout_rank(self) -> int:
        """Return the number that seeds dropout: this rank's, or one for all tensor ranks if each has the same whole sequences."""
        return self.run.world.rank // (self.run.tp_size if self.run.config.is_own else 1)

    def own_tokens(self, batch: Batch) -> Batch:
        """Return the tokens of a batch that this process has, where several share a sequence."""
        if self.cut_tokens is None:
            return batch
        return batch._replace(inputs=self.cut_tokens(batch.inputs), targets=self.cut_tokens(batch.targets))

    def micro_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return the inputs and targets of each micro-batch."""
        size = self.run.batch.micro_batch_size
        return list(zip(batch.inputs.split(size), batch.targets.split(size), strict=True))

    def count_targets(self, batch: Batch) -> Tensor:
        """Return how many targets of the global batch count in the loss, ()."""
        n_targets = (batch.targets != IGNORE).sum()
        if self.group is not None:
            dist.all_reduce(n_targets, group=self.group)
        return n_targets

    def gather(self, value: Tensor) -> Callable[[], Tensor]:
        """Begin to gather a scalar of each process. The function returned waits, and sums those of a data rank: (data_size,)."""
        if self.group is None:
            return lambda: value.view(1)
        gathered = value.new_empty(self.shares)
        work: Any = dist.all_gather_into_tensor(gathered, value.view(1), group=self.group, async_op=True)

        # It holds the tensor that is sent. Else NCCL's watchdog frees it at a moment of its own.
        def of_data_ranks(sent: Tensor = value) -> Tensor:
            work.wait()
            return gathered if self.shares == self.data_size else gathered.view(self.data_size, -1).sum(1)

        return of_data_ranks

    def optimizer_step(self, lr: float, loss: Tensor) -> Tensor:
        """Apply the gradients as `Stepper.step` does, and measure in the first steps what state is held just before."""
        if self._steps_measured < MEASURED_STEPS:
            self._steps_measured += 1
            device, disk = self.run.world.device, self.optimizer.disk_bytes()
            self._live_state = live_state(self.optimizer.state_tensors(), device, disk)
        return self.optimizer.step(lr, loss)

    def live_state(self) -> LiveState | None:
        return self._live_state

    def state(self) -> Iterable[Shard]:
        return self.optimizer.state()

    def counters(self) -> dict[str, float]:
        return self.optimizer.counters()

    def load_counters(self, counters: dict[str, float]) -> None:
        self.optimizer.load_counters(counters)

    def skip_steps(self, skips: Callable[[Tensor, Tensor], bool]) -> None:
        self.optimizer.skips = skips

    def offload(self) -> Offload | None:
        return self.optimizer.offload()

    def close(self) -> None:
        self.optimizer.close()


class TorchEngine(SteppedEngine):
    """Engine over `model`, whose forward(inputs, targets) returns the summed loss of a micro-batch.

    group: the processes that split the batch, None if only this one reads it. cut: takes this process's part of (batch, seq)
    where several share a sequence.
    set_grad_sync(on): sets whether the next backward communicates gradients.
    backward(loss): the strategy's own way to start a backward. Gradients must be the MEAN over `group`, as in DDP.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        optimizer: Stepper,
        *,
        group: dist.ProcessGroup | None = None,
        cut: Callable[[Tensor], Tensor] | None = None,
        set_grad_sync: Callable[[bool], None] = lambda on: None,
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> None:
        self.run, self.model, self.optimizer = run, model, optimizer
        self.set_grad_sync, self.backward = set_grad_sync, backward
        self.join(group, cut)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """Do one optimizer step on this process's share of a global batch.

        It has two small exchanges, of token counts and of losses. They run beside the first forward and the last backward.
        """
        self._release_graph_memory()
        progress.at("forward")
        seed_dropout(self.run.config.seed, batch.step, self.dropout_rank)
        self.model.train()
        batch = self.own_tokens(batch)
        micro_batches = self.micro_batches(batch)
        n_targets, wait_for_count = self._all_reduce((batch.targets != IGNORE).sum())
        loss = torch.zeros((), device=batch.inputs.device)
        for i, (inputs, targets) in enumerate(micro_batches, start=1):
            progress.at("forward", i - 1)
            self.set_grad_sync(i == len(micro_batches))
            with autocast(self.run.config.precision, inputs.device):
                micro_loss = self.model(inputs, targets)
            loss += micro_loss.detach()
            if i == 1:
                wait_for_count()
                # The strategy averages gradients over the ranks, but the loss is a mean over the tokens of all ranks. The
                # factor turns that average into a sum.
                grad_factor = self.optimizer.scale.to(loss.device) * self.shares / n_targets
            if i == len(micro_batches):
                losses = self.gather(loss / n_targets)
            self.backward(tell_backward(micro_loss * grad_factor))
        progress.at("optimizer")
        rank_losses = losses()
        loss = rank_losses.sum()
        return StepResult(loss, self.optimizer_step(lr, loss), rank_losses)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> Tensor:
        self.model.eval()
        batch = self.own_tokens(batch)
        loss = torch.zeros((), device=batch.inputs.device)
        for inputs, targets in self.micro_batches(batch):
            self._release_graph_memory()
            with autocast(self.run.config.precision, inputs.device):
                loss += self.model(inputs, targets)
        sums, wait_for_sums = self._all_reduce(torch.stack([loss, (batch.targets != IGNORE).sum().to(loss.dtype)]))
        wait_for_sums()
        return sums[0] / sums[1]

    def _release_graph_memory(self) -> None:
        """Tell CUDA graphs, if blocks are compiled to them, that their earlier outputs are no longer needed.

        Never call it between the micro-batches of a step: the gradients that are being summed are outputs of graphs.
        """
        if self.run.config.compile_mode in CUDA_GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()

    def _all_reduce(self, value: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """Begin to sum `value` over the group in place, and return it with the function that waits for the sum."""
        if self.group is None:
            return value, lambda: None
        return value, dist.all_reduce(value, group=self.group, async_op=True).wait


def tell_backward(loss: Tensor) -> Tensor:
    """Return `loss`, whose backward tells when it begins, and when all that is left of it is to wait for other ranks.

    DDP's wait for its buckets is in C++, in a callback at the end of backward. A callback that is queued before that runs first.
    """

    def begins(gradient: Tensor) -> None:
        progress.at("backward", progress.micro_batch)
        Variable._execution_engine.queue_callback(progress.wait_begins)  # type: ignore[attr-defined]

    loss.register_hook(begins)
    return loss


def holding_back(no_sync: Callable[[], AbstractContextManager[object]]) -> Callable[[bool], None]:
    """Return a `set_grad_sync` for TorchEngine, made of a library's context manager `no_sync`."""
    entered = ExitStack()

    def set_grad_sync(on: bool) -> None:
        entered.close()
        if not on:
            entered.enter_context(no_sync())

    return set_grad_sync


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank), so that a resumed run draws the same masks from no saved state.

    Every rank of the world has its own stream of random numbers. Tensor and pipeline ranks need that as much as data ranks,
    because no two ranks ever drop the same activations: attention drops in the heads of its rank, everything else in the
    rank's part of the sequence.
    """
    torch.manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))
