"""The seam: what every strategy must offer the one training loop, and nothing else. The cut is one optimizer step on this
process's share of one global batch: the widest operation that all of them share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gptscale.common.measure.bubble import Bubble
    from gptscale.common.measure.offload import Offload
    from gptscale.common.state import Shard


@dataclass(frozen=True)
class Batch:
    """This process's share of one global batch. step: the optimizer step it belongs to; with the seed it fixes order and dropout.
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
        return replace(self, inputs=inputs, targets=targets)


class StepResult(NamedTuple):
    """What one optimizer step leaves; tensors, so that reading them (and waiting) stays the loop's choice.
    loss: mean over the target tokens of the GLOBAL batch, detached, the same on every rank.
    grad_norm: 2-norm of the whole gradient before clipping, the same on every rank. rank_losses: (data_size,) each data rank's
    share of `loss`; names the rank that a NaN came from.
    """

    loss: Tensor
    grad_norm: Tensor
    rank_losses: Tensor


class Engine(Protocol):
    """A model and an optimizer, split over processes. data_rank, data_size: the share of the batch that this one reads."""

    data_rank: int
    data_size: int

    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """Forward, backward, accumulation, clipping, step; weights stay untouched if loss or norm is not finite."""

    def eval_loss(self, batch: Batch) -> Tensor:
        """Mean loss over the global batch, no gradients; the same on every rank."""

    def state(self) -> Iterable[Shard]:
        """Every box of weights and optimizer state held here; one may be live only until the next is asked for."""

    def counters(self) -> dict[str, float]:
        """Scalars of the state: optimizer steps taken, loss scale. The same on every rank."""

    def load_counters(self, counters: dict[str, float]) -> None:
        """Take `counters()` of a saved run back; the tensors of `state()` were filled in place before."""

    def offload(self) -> Offload | None:
        """What this process keeps off the device, and what that costs; None if nothing."""

    def bubble(self) -> Bubble | None:
        """How busy this process was in the pipeline; None if there is none."""

    def close(self) -> None:
        """Delete what would outlive the process: files."""
