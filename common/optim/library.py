"""The Stepper of libraries that bring an optimizer and clipping of their own (OSS, Accelerate, Lightning Fabric)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from gptscale.common.measure.live_state import StateTensor, held_by_torch
from gptscale.common.optim.fused import create_state, decay_groups
from gptscale.common.optim.stepper import Stepper
from gptscale.common.settings.optimizers import OPTIMIZERS
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.state import Shard, is_dtensor, shard_of


def torch_optimizer(config: RunConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of torch's optimizer that a run asks for, and its options, for a library to build or wrap."""
    return import_module(OPTIMIZERS[config.optimizer].module).of_torch(config)  # type: ignore[no-any-return]


def make_torch_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """Build the optimizer of `torch_optimizer` over the parameters of `model`."""
    kind, options = torch_optimizer(config)
    return kind(decay_groups(model.parameters(), config.weight_decay), **options)


class LibraryOptimizer(Stepper):
    """The Stepper over an optimizer that a library has wrapped.

    optimizer: what the library returned.
    inner: the optimizer of torch inside it. It holds the state, in some libraries only for this rank's share of the parameters.
    parameters: the parameters whose weights this process holds, by canonical name.
    clip(max_norm): the library's function that scales the gradients and returns their global norm.
    boxes(name, tensor): returns the boxes that a local tensor fills in the whole tensor.
    """

    def __init__(
        self,
        optimizer: Any,
        inner: torch.optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        config: RunConfig,
        *,
        clip: Callable[[float], Tensor],
        boxes: Callable[[str, Tensor], Iterable[Shard]] = lambda name, tensor: [shard_of(name, tensor)],
    ) -> None:
        super().__init__(next(iter(parameters.values())).device)
        self.boxes = boxes
        self.optimizer, self.inner, self.parameters = optimizer, inner, parameters
        self.max_norm, self.clip = config.clip_grad_norm or torch.inf, clip
        self.poisoned = False
        self.name, self.state_keys = config.optimizer, OPTIMIZERS[config.optimizer].state_keys
        names = {parameter: name for name, parameter in parameters.items()}
        self.owned = {names[p]: p for group in inner.param_groups for p in group["params"]}
        create_state(inner, self.owned.values(), self.state_keys)

    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Clip the gradients, step, clear them, and return their global norm before clipping, ().

        The host waits for loss and norm first, because the step of a library cannot be told to do nothing.
        """
        norm = self.clip(self.max_norm)
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        # Once set it stays set: after one bad step no later step may change the weights.
        self.poisoned = self.poisoned or not self.is_finite(loss, norm)
        if not self.poisoned and not (self.skips and self.skips(loss, norm)):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> Iterator[Shard]:
        """Yield the weights, then the optimizer state of the parameters that this rank owns."""
        for name, p in self.parameters.items():
            yield from self.boxes(f"model/{name}", p)
        for name, p in self.owned.items():
            for key in self.state_keys:
                yield from self.boxes(f"{self.name}.{key}/{name}", self.inner.state[p][key])

    def state_tensors(self) -> Iterator[StateTensor]:
        return held_by_torch(self.parameters.values(), self.inner)

    def counters(self) -> dict[str, float]:
        """Return the number of steps applied, and a loss scale of 1, since any other is kept by the library."""
        steps = [float(state["step"]) for state in self.inner.state.values()]
        return {"optimizer_steps": max(steps, default=0.0), "loss_scale": 1.0, "loss_scale_good_steps": 0.0}

    def load_counters(self, counters: dict[str, float]) -> None:
        """Restore `counters()`, and publish the weights that were loaded before the call."""
        for state in self.inner.state.values():
            state["step"].fill_(counters["optimizer_steps"])
        self.publish()

    def publish(self) -> None:
        """Copy the weights to where the library computes with them, if it keeps copies."""
