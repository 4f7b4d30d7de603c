"""One rank of a world that is not started: a process group whose peers do not exist.

torch has a fake process group too. Its collectives answer nothing at all, which DDP and libraries that exchange objects do
not take, and they allocate nothing. This one answers what the peers would if they were this rank: sums are the rank's own
numbers, and gathered parts are all its own. What gloo allocates for a collective it allocates too, for as long as gloo holds
it (tests/foresight/memory/test_trace.py holds it to gloo).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptscale.common.process.world import DEFAULT_TIMEOUT_S, World

BACKEND = "gptscale_fake"
# What is told of the tensors of each collective: "sent" by this rank to be summed, or "received" in whole.
Observer = Callable[[str, Tensor], object]
_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell `observer` of the tensors that fake groups are given while the body runs."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _tell(what: str, tensors: Iterable[Tensor]) -> None:
    for observer in _observers:
        for tensor in tensors:
            observer(what, tensor)


class DoneWork(dist._Work):  # type: ignore[name-defined, misc]
    """A collective that is done already, and what gloo would hold until the caller lets go of it."""

    def __init__(self, outputs: Sequence[Tensor], held: object = None) -> None:
        super().__init__()
        self.held = held
        self._future: Any = torch.futures.Future()
        self._future.set_result(list(outputs))

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[Tensor]:
        return list(self._future.value())


# torch's stubs give its methods other signatures than it calls them with.
_ProcessGroup: Any = dist.ProcessGroup


class FakeGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group of which only this rank exists."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: Any, opts: object = None) -> DoneWork:
        _tell("sent", tensors if isinstance(tensors, list) else [tensors])
        return DoneWork(tensors if isinstance(tensors, list) else [tensors])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: object = None) -> DoneWork:
        return DoneWork(tensors, torch.cat([t.flatten() for t in tensors]))

    def broadcast(self, tensors: Any, opts: object = None) -> DoneWork:
        return DoneWork(tensors if isinstance(tensors, list) else [tensors])

    def reduce(self, tensors: Any, opts: object = None) -> DoneWork:
        return DoneWork(tensors if isinstance(tensors, list) else [tensors])

    def barrier(self, opts: object = None) -> DoneWork:
        return DoneWork([])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> DoneWork:
        for parts, own in zip(outputs, inputs, strict=True):
            _flat_copy(own, len(parts))
            with torch.no_grad():
                for part in parts:
                    part.copy_(own.view_as(part))
        return DoneWork([part for parts in outputs for part in parts])

    def _allgather_base(self, output: Tensor, own: Tensor, opts: object = None) -> DoneWork:
        _tell("received", [output])
        _flat_copy(own, self._size)
        with torch.no_grad():
            output.view(self._size, -1).copy_(own.reshape(1, -1).expand(self._size, -1))
        return DoneWork([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> DoneWork:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return DoneWork(outputs)

    def _reduce_scatter_base(self, output: Tensor, parts: Tensor, opts: object = None) -> DoneWork:
        _tell("sent", [parts])
        buffer = parts.clone()
        with torch.no_grad():
            output.copy_(buffer.view(self._size, -1)[self._rank].view_as(output))
        return DoneWork([output], buffer)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> DoneWork:
        works = [self._reduce_scatter_base(*pair) for pair in zip(outputs, inputs, strict=True)]
        return DoneWork(outputs, works)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None) -> DoneWork:
        with torch.no_grad():
            for output, parts in zip(outputs, inputs, strict=True):
                output.copy_(parts[self._rank])
        return DoneWork(outputs, [output.clone() for output in outputs])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> DoneWork:
        return self.allgather(outputs, inputs[: len(outputs)])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None) -> DoneWork:
        with torch.no_grad():
            for output, parts in zip(outputs, inputs, strict=False):
                output.copy_(parts[self._rank])
        return DoneWork(outputs)

    def alltoall_base(
        self, output: Tensor, own: Tensor, out_sizes: object, in_sizes: object, opts: object = None
    ) -> DoneWork:
        return DoneWork([output.zero_()])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> DoneWork:
        return DoneWork([output.zero_() for output in outputs])

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> DoneWork:
        return DoneWork(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> DoneWork:
        return DoneWork([tensor.detach().zero_() for tensor in tensors])


def _flat_copy(own: Tensor, times: int) -> None:
    """Allocate and free the flat copy of all parts that gloo receives into."""
    own.new_empty(own.numel() * times)


def believe_rank_0(engine: str) -> None:
    """Let a library take this rank's numbers for those of rank 0, which is not there to broadcast them.

    DeepSpeed's stage 3 compares such numbers on every rank.
    """
    if engine == "deepspeed":
        from deepspeed.runtime.zero import utils

        utils.get_lst_from_rank0 = list
        utils.assert_lst_len_same_as_other_ranks = lambda numbers: None


@contextmanager
def fake_world(rank: int, nproc: int) -> Iterator[World]:
    """Be `rank` of `nproc` processes on CPUs while the body runs, of which the others do not exist."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: FakeGroup(rank, size), devices=["cpu"]
        )
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    texts = {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    before = {name: os.environ.get(name) for name in texts}
    os.environ.update(texts)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=nproc)
    try:
        yield World(rank, rank, nproc, torch.device("cpu"), DEFAULT_TIMEOUT_S["cpu"])
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
