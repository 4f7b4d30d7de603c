"""A world of which one rank is real: its peers hold what it holds, and answer at once.

The rank's own NCCL calls go to the mock of NCCL. On the CPU torch's fake process group stands in for gloo. Both leave the values
of a reduction as they are. What is gathered is this rank's value as often as there are peers, so that lists of objects can be
read. What a peer would send stays zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Importing it registers the backend "fake".
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from gptscale.common.process.world import World

# Torch calls the Python object's methods through the C++ object that a group holds, so the Python object must stay.
_stores: list[dist.Store] = []


class LoneStore(dist.Store):
    """A store that never waits: it gives what this rank has set, and otherwise zeros of the length of NCCL's identifier."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        _stores.append(self)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.values.get(key, bytes(128))

    def add(self, key: str, number: int) -> int:
        total = int(self.values.get(key, b"0")) + number
        self.values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self.set(key, desired)
        return self.values[key]

    def wait(self, *keys_and_timeout: Any) -> None: ...

    def check(self, keys: list[str]) -> bool:
        # NCCL's watchdog looks for the key of a peer that failed.
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.values)

    def clone(self) -> LoneStore:
        return self


def environment_of(rank: int, world_size: int, ranks_per_node: int) -> dict[str, str]:
    """Return what a launcher would set in the environment of `rank`."""
    local = min(ranks_per_node, world_size)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    numbers = (rank, world_size, rank % local, local, rank // local, -(-world_size // local))
    return {
        **{name: str(number) for name, number in zip(names, numbers, strict=True)},
        # Nobody listens there. A library that looks for its peers fails at once instead of waiting.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


@contextmanager
def lone_group(world: World) -> Iterator[None]:
    """Hold a default process group of `world.world_size` ranks, of which only `world.rank` is there."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    _answer_for_peers()
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=LoneStore(), rank=world.rank, world_size=world.world_size)
    yield
    # There is no peer to say goodbye to. The process is about to end, and its end frees everything.


def _answer_for_peers() -> None:
    """Replace gloo, and the calls whose result comes from a peer."""
    names = vars(distributed_c10d)
    for replace in (
        _init_process_group,
        _new_group,
        _all_gather,
        _all_gather_into_tensor,
        _broadcast_object_list,
        _scatter_object_list,
    ):
        name = replace.__name__.removeprefix("_")
        names[name] = replace(names[name])
        setattr(dist, name, names[name])


def _init_process_group(original: Any) -> Any:
    """Return init_process_group with a lone store, for libraries that begin a group of their own."""

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> Any:
        if "store" not in options:
            options.pop("init_method", None)
            options.update(store=LoneStore(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        options.pop("device_id", None)
        return original(_without_gloo(backend), *args, **options)

    return init_process_group


def _new_group(original: Any) -> Any:
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: str | None = None, *args: Any, **options: Any
    ) -> Any:
        return original(ranks, timeout, _without_gloo(backend), *args, **options)

    return new_group


def _without_gloo(backend: str | None) -> str | None:
    return backend and backend.replace("gloo", "fake")


def _all_gather(original: Any) -> Any:
    def all_gather(tensor_list: list[Any], tensor: Any, *args: Any, **options: Any) -> Any:
        for each in tensor_list if tensor.device.type == "cpu" else ():
            each.copy_(tensor)
        return original(tensor_list, tensor, *args, **options)

    return all_gather


def _all_gather_into_tensor(original: Any) -> Any:
    def all_gather_into_tensor(output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        if input_tensor.device.type == "cpu":
            output_tensor.view(-1, input_tensor.numel()).copy_(input_tensor.reshape(1, -1))
        return original(output_tensor, input_tensor, *args, **options)

    return all_gather_into_tensor


def _broadcast_object_list(original: Any) -> Any:
    def broadcast_object_list(objects: list[Any], *source_and_group: Any, **options: Any) -> None: ...

    return broadcast_object_list


def _scatter_object_list(original: Any) -> Any:
    def scatter_object_list(output: list[Any], objects: Any = None, *source_and_group: Any, **options: Any) -> None:
        if objects:
            output[0] = objects[0]

    return scatter_object_list
