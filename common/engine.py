"""The seam: what every strategy must offer the one training loop, and nothing else.

The cut is one optimizer step on this process's share of one global batch, because that is the widest operation that
means the same thing in DDP, FSDP, DeepSpeed, a Colossal-AI booster and a pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptscale.common.state import Shard


@dataclass(frozen=True)
class Batch:
    """This process's share of one global batch.

    step: the optimizer step it belongs to; with the seed it fixes order and dropout.
    inputs, targets: int64 token ids, (sequences, seq_len); a target of -100 is not counted in the loss.
    sequences: the sequences' indices in the data source, to name a batch in an error.
    """

    step: int
    inputs: Tensor
    targets: Tensor
    sequences: tuple[int, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`, copied without blocking the host."""
        inputs, targets = (t.to(device, non_blocking=True) for t in (self.inputs, self.targets))
        return Batch(self.step, inputs, targets, self.sequences)


class StepResult(NamedTuple):
    """What one optimizer step leaves; tensors, so that reading them (and waiting) stays the loop's choice.

    loss: mean over the target tokens of the GLOBAL batch, detached, the same on every rank.
    grad_norm: 2-norm of the whole model's gradient before clipping, the same on every rank.
    rank_losses: (data_size,) each data rank's share of `loss`; names the rank that a NaN came from.
    """

    loss: Tensor
    grad_norm: Tensor
    rank_losses: Tensor


class Engine(Protocol):
    """A model, an optimizer and a way to split both over processes.

    data_rank, data_size: which share of the global batch this process reads; tensor and pipeline peers share one.
    """

    data_rank: int
    data_size: int

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """Forward, backward, accumulation, clipping, optimizer step, zeroed gradients.

        A step whose loss or gradient norm is not finite must leave the weights untouched.
        """

    def eval_loss(self, batch: Batch) -> Tensor:
        """Mean loss over the global batch, no gradients; the same on every rank."""

    def state(self) -> Iterable[Shard]:
        """Every box of weights and optimizer state that this process holds."""

    def counters(self) -> dict[str, float]:
        """Scalars of the state: optimizer steps taken, loss scale. The same on every rank."""

    def load_counters(self, counters: dict[str, float]) -> None:
        """Take `counters()` of a saved run back; the tensors of `state()` were filled in place before."""
