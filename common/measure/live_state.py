"""The training state that one process holds: bytes of weights, gradients and optimizer state, and where they are.

Unlike the resident set of a process, this shows what a strategy saves also for a small model on a CPU. What a library gathers,
sends or pads beside it, activations and buffers, is not state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gptscale.common.state import local

Kind = Literal["weights", "gradients", "optimizer"]
# How deep the tensors of a library's optimizer lie in its lists and dictionaries.
DEPTH = 4


class StateTensor(NamedTuple):
    """A tensor of the state.

    on_host: the strategy keeps it in host memory, which on a CPU is the device's own.
    """

    kind: Kind
    tensor: Tensor
    on_host: bool = False


@dataclass(frozen=True)
class LiveState:
    """Bytes of the state that one process holds just before an optimizer step, when gradients are there too.

    weights, gradients, optimizer: in the memory of the device. Weights are those that are computed with, and fp32 copies of them
    belong to the optimizer. host, disk: of all three kinds, what the strategy keeps in host memory and in files.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.host + self.disk


def live_state(tensors: Iterable[StateTensor], device: torch.device, disk: int = 0) -> LiveState:
    """Add up the memory of tensors, each once.

    Several tensors may be views of one memory, such as gradients in a bucket. It has the kind of the first of them.
    """
    places = dict.fromkeys(("weights", "gradients", "optimizer", "host"), 0)
    counted: set[int] = set()
    for entry in tensors:
        storage = local(entry.tensor).untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in counted:
            continue
        counted.add(storage.data_ptr())
        on_host = entry.on_host or entry.tensor.device.type != device.type
        places["host" if on_host else entry.kind] += storage.nbytes()
    return LiveState(**places, disk=disk)


def held_by_torch(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, *, on_host: bool = False
) -> Iterator[StateTensor]:
    """Yield parameters, their gradients, and what an optimizer of torch's keeps for each of them."""
    for parameter in parameters:
        yield StateTensor("weights", parameter, on_host)
        if parameter.grad is not None:
            yield StateTensor("gradients", parameter.grad, on_host)
    for state in optimizer.state.values():
        yield from (StateTensor("optimizer", tensor, on_host) for tensor in tensors_in(state))


def tensors_in(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in lists and dictionaries, at most `depth` deep."""
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    for part in inner if depth else ():
        yield from tensors_in(part, depth - 1)


@dataclass(frozen=True)
class Offload:
    """What one process keeps off the device.

    cpu_bytes, disk_bytes: training state in host memory and in files.
    read_bytes_per_s, write_bytes_per_s: the rates of its files, None without files.
    waits_s: for each optimizer step so far, the seconds blocked in file I/O and in the optimizer's step on the host.
    """

    cpu_bytes: int = 0
    disk_bytes: int = 0
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    waits_s: tuple[float, ...] = ()


class StepMeter:
    """A meter of the seconds spent inside `optimizer.step()`, which a strategy may call several times per training step."""

    def __init__(self, optimizer: torch.optim.Optimizer, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total_s, self._clock, self._began = 0.0, clock, 0.0
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *args: object) -> None:
        self._began = self._clock()

    def _after(self, *args: object) -> None:
        self.total_s += self._clock() - self._began
