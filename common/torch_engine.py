"""The engine of every recipe that is plain PyTorch: accumulation, global loss, one optimizer step.

A strategy hands in its wrapped model and says two things about itself: over which processes the batch is split, and how
to hold gradient communication back during accumulation. Nothing here knows which strategy that is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptscale.common.engine import Batch, StepResult
from gptscale.common.loss import IGNORE
from gptscale.common.model import GPT
from gptscale.common.optimizer import Optimizer
from gptscale.common.precision import autocast
from gptscale.common.state import Shard, shard_of

if TYPE_CHECKING:
    from gptscale.common.run import Run


class TorchEngine:
    """Engine over `wrapped`, whose forward(inputs, targets) gives the summed loss of a micro-batch.

    model: the GPT inside `wrapped`, with canonical parameter names. group: the processes that split the batch, None for
    one. sharded: whether they also split the gradients. set_grad_sync(on): whether the next backward communicates.
    Gradients must come out as the MEAN over `group`, as DDP and FSDP do.
    """

    def __init__(
        self,
        run: Run,
        model: GPT,
        wrapped: nn.Module | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        sharded: bool = False,
        set_grad_sync: Callable[[bool], None] = lambda on: None,
    ) -> None:
        self.run, self.model, self.wrapped, self.group = run, model, wrapped or model, group
        self.set_grad_sync = set_grad_sync
        self.data_rank = dist.get_rank(group) if group else 0
        self.data_size = dist.get_world_size(group) if group else 1
        self.optimizer = Optimizer(dict(model.named_parameters()), run.config, group if sharded else None)

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """One optimizer step on this process's share of a global batch."""
        seed_dropout(self.run.config.seed, batch.step, self.data_rank)
        self.wrapped.train()
        micro_batches = self._micro_batches(batch)
        n_targets = self._all_reduce((batch.targets != IGNORE).sum())
        # Gradients are averaged over ranks, the loss is a mean over all ranks' tokens: data_size makes one the other.
        to_grad = self.optimizer.loss_scale.value.to(batch.inputs.device) * self.data_size / n_targets
        loss = torch.zeros((), device=batch.inputs.device)
        for i, (inputs, targets) in enumerate(micro_batches, start=1):
            self.set_grad_sync(i == len(micro_batches))
            with autocast(self.run.config.precision, inputs.device):
                micro_loss = self.wrapped(inputs, targets)
            (micro_loss * to_grad).backward()
            loss += micro_loss.detach()
        rank_losses = self._all_gather(loss / n_targets)
        loss = rank_losses.sum()
        return StepResult(loss, self.optimizer.step(lr, loss), rank_losses)

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> Tensor:
        """Mean loss over the global batch."""
        self.wrapped.eval()
        loss = torch.zeros((), device=batch.inputs.device)
        for inputs, targets in self._micro_batches(batch):
            with autocast(self.run.config.precision, inputs.device):
                loss += self.wrapped(inputs, targets)
        return self._all_reduce(loss) / self._all_reduce((batch.targets != IGNORE).sum())

    def state(self) -> Iterator[Shard]:
        """Weights, then optimizer state."""
        for name, p in self.model.named_parameters():
            yield shard_of(f"model/{name}", p)
        yield from self.optimizer.state()

    def counters(self) -> dict[str, float]:
        """The optimizer's."""
        return self.optimizer.counters()

    def load_counters(self, counters: dict[str, float]) -> None:
        """The optimizer's."""
        self.optimizer.load_counters(counters)

    def _micro_batches(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        size = self.run.batch.micro_batch_size
        return list(zip(batch.inputs.split(size), batch.targets.split(size), strict=True))

    def _all_reduce(self, value: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def _all_gather(self, value: Tensor) -> Tensor:
        gathered = value.new_empty(self.data_size)
        if self.group is None:
            return gathered.copy_(value)
        dist.all_gather_into_tensor(gathered, value.view(1), group=self.group)
        return gathered


def seed_dropout(seed: int, step: int, data_rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank): nothing to save, and a resumed run draws the same masks."""
    torch.manual_seed(zlib.crc32(f"{seed} {step} {data_rank}".encode()))
