"""Where this process stands among its peers, and the process group's start and end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gptscale.common.errors import ConfigError
from gptscale.common.process.begin import wait_for_free_cores
from gptscale.common.process.mock import refuse_mock
from gptscale.common.process.progress import count_waits
from gptscale.common.process.rendezvous import open_store, prefix_of_start, warn_of_open_port, whole_number
from gptscale.common.process.roll_call import RANKS_MAX, RollCall

DEFAULT_TIMEOUT_S = {"cpu": 120.0, "cuda": 600.0}

# Process groups that have ended are kept until the process ends. Whoever drops the last reference joins gloo's threads.
# DDP's reducer drops its reference while it holds Python's lock, and a gloo thread that is freeing the tensors of a finished
# collective waits for that lock. Then both wait for ever (seen in 3 of 100 worlds that freed a DDP model after its group).
_ended: list[dist.ProcessGroup] = []


@dataclass(frozen=True)
class World:
    """The rank and the device of this process.

    It is made before any process group. timeout_s: the longest wait in a collective before it fails instead of hanging.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    timeout_s: float

    @classmethod
    def from_environment(cls, device: str = "auto", timeout_s: float | None = None) -> World:
        """Read what torchrun, a job of Slurm or `gptscale run` set in the environment.

        A process that none of them started is a world of one. device: auto (CUDA when it is there), cpu or cuda.
        timeout_s: None is the default of the device. Raises ConfigError if the device or a variable is missing.
        """
        refuse_mock("train")
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("no CUDA device is visible", "in --device cuda", "use --device cpu")
        launched = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]
        if launched and len(launched) < 3:
            missing = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} - set(launched)
            what = f"{', '.join(sorted(missing))} is not set though {launched[0]} is"
            raise ConfigError(what, "in the environment", "start with `gptscale run` or torchrun")
        world_size = whole_number("WORLD_SIZE", 1, 1, RANKS_MAX)
        rank, local_rank = (whole_number(name, 0, 0, world_size - 1) for name in ("RANK", "LOCAL_RANK"))
        whole_number("LOCAL_WORLD_SIZE", 1, 1, world_size)
        on_cuda = runs_on_cuda(device)
        if on_cuda and local_rank >= torch.cuda.device_count():
            what = f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible)"
            raise ConfigError(what, "in the launch", f"start at most {torch.cuda.device_count()} processes per node")
        its_device = torch.device("cuda", local_rank) if on_cuda else torch.device("cpu")
        return cls(rank, local_rank, world_size, its_device, timeout_s or DEFAULT_TIMEOUT_S[its_device.type])

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def runs_on_cuda(device: str) -> bool:
    """Return whether a run with `--device device` goes to GPUs on this machine."""
    return device != "cpu" and torch.cuda.is_available()


def world_of(device: str, timeout_s: float | None, nproc: int) -> World:
    """Return the world that `nproc` processes on this machine will be, as rank 0 will see it.

    Raises ConfigError if there are fewer GPUs than processes.
    """
    alone = World.from_environment(device, timeout_s)
    if alone.device.type == "cuda" and nproc > torch.cuda.device_count():
        what = f"{nproc} processes need as many GPUs, {torch.cuda.device_count()} visible"
        raise ConfigError(what, "in --nproc", f"use --nproc {torch.cuda.device_count()}, or --device cpu")
    return dataclasses.replace(alone, world_size=nproc)


@contextmanager
def process_group(
    world: World, *, facts: Mapping[str, object] | None = None, cuda_backend: str = "nccl"
) -> Iterator[None]:
    """Hold the default process group while the body runs.

    facts: what this rank was started with, in which no rank may differ. CPU tensors use gloo, and CUDA tensors use
    `cuda_backend`. After an exception the group is not torn down: peers may be gone, and the teardown would wait for them. The
    process is about to end, and its end closes the connections, which tells the peers. Raises ConfigError if the rendezvous
    cannot be opened or reached, and what RollCall.sign_in raises.
    """
    store = open_store(world.rank, world.timeout_s)
    if world.is_main:
        warn_of_open_port()
    # The ranks of one machine need no other interface. By itself gloo listens on the one that the host's name stands for.
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world.world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    elif world.world_size > 1:
        # Before gloo starts its threads.
        wait_for_free_cores()
    backend = f"cpu:gloo,cuda:{cuda_backend}" if world.device.type == "cuda" else "gloo"
    # A device lets NCCL connect at once. Gloo has no use for it.
    device_id = world.device if "nccl" in backend else None
    timeout = timedelta(seconds=world.timeout_s)
    # Libraries make groups of their own without a timeout (DeepSpeed's is all ranks again), which would wait for half an hour.
    constants = vars(dist.distributed_c10d)
    constants["default_pg_timeout"] = constants["default_pg_nccl_timeout"] = timeout
    if world.world_size > 1:
        roll_call = RollCall(store, world.rank, world.world_size)
        roll_call.sign_in({name: str(value) for name, value in (facts or {}).items()}, world.timeout_s)
    own, rank, size = dist.PrefixStore(prefix_of_start(), store), world.rank, world.world_size
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    count_waits()
    yield
    dist.barrier()
    _ended.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def agree_any(flag: bool) -> bool:
    """Return whether any rank says yes. Every rank gets the same answer."""
    if not dist.is_initialized():
        return flag
    # On the CPU: gloo is there beside NCCL, and so nobody waits for a GPU.
    votes = torch.tensor(float(flag))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def gather_numbers(values: list[float]) -> list[list[float]]:
    """Return the `values` of every rank, in rank order, as one small exchange between hosts."""
    if not dist.is_initialized():
        return [values]
    own = torch.tensor(values, dtype=torch.float64)
    gathered = own.new_empty(dist.get_world_size() * len(values))
    dist.all_gather_into_tensor(gathered, own)
    rows: list[list[float]] = gathered.view(-1, len(values)).tolist()
    return rows


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the `value` of every rank, in rank order. Without a process group that is [value].

    group: all ranks again, for a thread beside the one that trains; None is the default group.
    """
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered
