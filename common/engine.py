"""The engine: what every strategy offers the one training loop, an optimizer step on this process's share of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from gptscale.common.measure.bubble import Bubble
    from gptscale.common.measure.live_state import LiveState, Offload
    from gptscale.common.state import Shard


class Batch(NamedTuple):
    """This process's share of the global batch of one optimizer step."""

    # Counts from 0. With the seed it fixes the order of the data, and dropout.
    step: int
    # int64 token ids, (sequences, seq_len)
    inputs: torch.Tensor
    # the same type and shape. A target of -100 does not count in the loss.
    targets: torch.Tensor
    # indices of the sequences in the data source. An error names the batch by them.
    sequences: tuple[int, ...] = ()


class StepResult(NamedTuple):
    """The figures of one optimizer step, as tensors, so that the loop decides when to read them and wait."""

    # (), mean over the target tokens of the GLOBAL batch, detached. It is the same on every rank.
    loss: torch.Tensor
    # (), 2-norm of the whole gradient before clipping. It is the same on every rank.
    grad_norm: torch.Tensor
    # (data_size,), each data rank's share of `loss`. It shows which rank a NaN came from.
    rank_losses: torch.Tensor
    # (), 1 if an overflow in fp16 left the step out, else 0. None where the norm tells.
    skipped: torch.Tensor | None = None


class Engine(ABC):
    """A model and its optimizer, split over processes, of which this one reads share `data_rank` of `data_size`."""

    data_rank: int
    data_size: int

    @abstractmethod
    def train_step(self, batch: Batch, lr: float) -> StepResult:
        """Do one whole optimizer step, and leave the weights untouched if loss or norm is not finite."""

    @abstractmethod
    def eval_loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the global batch, without gradients and the same on every rank."""

    @abstractmethod
    def state(self) -> Iterable[Shard]:
        """Yield every box of weights and optimizer state held here, each valid only until the next is asked for."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Return the scalars of the state, such as steps taken and loss scale, which are the same on every rank."""

    @abstractmethod
    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore the `counters()` of a saved run, after the tensors of `state()` were filled in place."""

    def skip_steps(self, skips: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
        """Ask `skips`, with the global loss and gradient norm, before each optimizer step whether to leave it out."""
        raise NotImplementedError("this engine cannot leave a step out")

    def offload(self) -> Offload | None:
        """Return what this process keeps off the device and what that costs, or None if it keeps nothing there."""
        return None

    def bubble(self) -> Bubble | None:
        """Return how busy this process was in the pipeline, or None if there is no pipeline."""
        return None

    def live_state(self) -> LiveState | None:
        """Return the bytes of state that this process holds just before an optimizer step, or None if it did not measure."""
        return None

    def close(self) -> None:  # noqa: B027 (most engines leave nothing behind)
        """Delete the files that would outlive the process."""
