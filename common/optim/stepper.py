"""What an engine asks of an optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gptscale.common.measure.live_state import Offload, StateTensor
from gptscale.common.state import Shard


class Stepper(ABC):
    """An optimizer as an engine sees it, together with the weights that it steps.

    common/optim/fused.py has the one of torch's own recipes. A library that brings its own optimizer brings its own Stepper.
    """

    # Asked before each step, with the global loss and the norm, whether to leave the step out. It must be told on every rank.
    skips: Callable[[Tensor, Tensor], bool] | None = None

    def __init__(self, device: torch.device) -> None:
        self._one = torch.ones((), device=device)

    @property
    def scale(self) -> Tensor:
        """The factor of the loss before backward, (): fp16's loss scale if this Stepper keeps one, else 1."""
        return self._one

    def is_finite(self, *values: Tensor) -> bool:
        """Return whether all values, (), are finite. The host waits for them."""
        return all(bool(torch.isfinite(value)) for value in values)

    @abstractmethod
    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Apply the gradients at rate `lr`, clear them, and return their global norm before clipping, ().

        loss: the global loss, (). If it or the norm is not finite, no weight changes.
        """

    @abstractmethod
    def state(self) -> Iterable[Shard]:
        """Return every box of weights and optimizer state that this process holds."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Return the scalars of the state, as `Engine.counters` does."""

    @abstractmethod
    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore what `counters()` returned in a saved run."""

    @abstractmethod
    def state_tensors(self) -> Iterable[StateTensor]:
        """Return the tensors in memory that weights, gradients and optimizer state are in, weights first."""

    def disk_bytes(self) -> int:
        """Return the bytes of state that this process keeps in files."""
        return 0

    def offload(self) -> Offload | None:
        """Return what this process keeps off the device, and what that costs, or None if nothing."""
        return None

    def close(self) -> None:  # noqa: B027
        """Delete the files that would outlive the process."""
