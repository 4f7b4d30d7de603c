"""An account of live bytes by category: every storage that an operator returns, from its allocation to its release.

It works on any device. A dispatch mode sees the results of all operators, in forward, backward and optimizer. A weak reference to
each storage shows when its last tensor is gone. The account does not see memory that a kernel allocates and frees within one
call, nor memory that libraries keep for themselves (workspaces of cuBLAS and cuDNN).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptscale.common.measure.speed import reset_peak_memory


class Event(NamedTuple):
    """An allocation (change_bytes above 0), a release, or the begin or the end of a phase (0 bytes, and no storage).

    time_s: seconds since the account began, for an allocation until its operator began. op: the operator, empty for a release.
    storage: its number. allocated_bytes, peak_allocated_bytes: CUDA's own count at a phase's end, and its highest in this step.
    """

    time_s: float
    step: int
    phase: str
    op: str
    storage: int
    change_bytes: int
    allocated_bytes: int | None = None
    peak_allocated_bytes: int | None = None


class StorageAccount(TorchDispatchMode):
    """The account of one device, kept while this mode is entered.

    `begin` starts the next phase or step. A storage gets its category when it is saved for backward, becomes a parameter's
    gradient or is labelled by `hold`. The category then counts for its whole life. A storage from the phase `loading` is an
    input, and one that gets no category is `other`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.live_bytes = device, 0
        self.events: list[Event] = []
        # By number of the storage.
        self.categories: list[str] = []
        self._nbytes: list[int] = []
        self._phase_of_allocation: list[str] = []
        self._step, self._phase, self._began, self._operator_began_s = 0, "setup", time.perf_counter(), 0.0
        # By address of the StorageImpl.
        self._watched: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operator_began_s = self._now()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                self._number(tensor, str(func))
        return result

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        # Releases from now on are no part of the account.
        self._watched.clear()

    def hold(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Count the storages of `tensors`, old and new ones, as `category`."""
        for tensor in tensors:
            if tensor is not None and tensor.device.type == self.device.type:
                self.categories[self._number(tensor)] = category

    def saved(self, tensor: Tensor) -> Tensor:
        """Count a tensor that forward made and autograd keeps for backward as an activation, and return it.

        This is the pack hook for torch.autograd.graph.saved_tensors_hooks.
        """
        if tensor.device.type == self.device.type:
            number = self._number(tensor)
            if self._phase_of_allocation[number] == "forward" and self.categories[number] == "other":
                self.categories[number] = "activations"
        return tensor

    def begin(self, phase: str, step: int | None = None) -> None:
        """End the current phase and begin another, of the same step or of 1-based `step`."""
        counted: tuple[int | None, int | None] = None, None
        if self.device.type == "cuda":
            counted = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        self.events.append(Event(self._now(), self._step, self._phase, "", -1, 0, *counted))
        self._phase = phase
        if step is not None:
            self._step = step
            reset_peak_memory(self.device)
        self.events.append(Event(self._now(), self._step, self._phase, "", -1, 0))

    def timeline(self) -> pd.DataFrame:
        """Return a row for each event: its fields, `category`, `live_bytes` after it, and the live bytes of each category."""
        frame = pd.DataFrame(self.events, columns=list(Event._fields))
        # A phase's begin or end has the number -1, and is of no category.
        frame["category"] = [[*self.categories, ""][number] for number in frame.storage]
        frame["live_bytes"] = frame.change_bytes.cumsum()
        for category in dict.fromkeys(self.categories):
            frame[category] = frame.change_bytes.where(frame.category == category, 0).cumsum()
        return frame

    def _number(self, tensor: Tensor, op: str = "") -> int:
        """Return the number of the tensor's storage, after adding an event if it is new or has another size than before."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._watched:
            self._watched[address] = len(self.categories), weakref.ref(storage, lambda _: self._release(address))
            self.categories.append("inputs" if self._phase == "loading" else "other")
            self._phase_of_allocation.append(self._phase)
            self._nbytes.append(0)
        number, _ = self._watched[address]
        self._change(number, storage.nbytes() - self._nbytes[number], op)
        return number

    def _release(self, address: int) -> None:
        number, _ = self._watched.pop(address)
        self._change(number, -self._nbytes[number], "")

    def _change(self, number: int, change_bytes: int, op: str) -> None:
        if not change_bytes:
            return
        self._nbytes[number] += change_bytes
        self.live_bytes += change_bytes
        last_s = self.events[-1].time_s if self.events else 0.0
        time_s = max(self._operator_began_s, last_s) if op else self._now()
        self.events.append(Event(time_s, self._step, self._phase, op, number, change_bytes))

    def _now(self) -> float:
        return time.perf_counter() - self._began
