"""What a program on mocked GPUs meets in its process: peers that answer, and launchers that become the one rank.

A world has one real rank. Its peers hold what it holds, and answer at once. Its NCCL calls go to the mock of NCCL. On the CPU
torch's fake process group stands in for gloo. Both leave the values of a reduction as they are. What is gathered is this
rank's value as often as there are peers, so that lists of objects can be read. What a peer would send stays zero.

A program of somebody else reads a copy of this file (on_path.py) in an environment without gptscale. So it imports torch alone.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Importing it registers the backend "fake".
from torch.testing._internal.distributed import fake_pg  # noqa: F401

# The task of a simulated program, as JSON, which its starter (foresight/simulate/program.py) writes.
TASK = "GPTSCALE_SIMULATED_PROGRAM"
# Variables that torchrun sets beside the ranks. The store of its agent is not there.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "simulated",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
# Torch calls the Python object's methods through the C++ object that a group holds, so the Python object must stay.
_stores: list[dist.Store] = []
_mock = ctypes.CDLL(None)

# Ranks that this one has sent something to, and how many lists of objects went to and came from each.
_sent_to: set[int] = set()
_objects_to: Counter[int] = Counter()
_objects_from: Counter[int] = Counter()


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


def check_ranks(wanted: int) -> int:
    """Return the ranks of this world. A program that wants more is refused."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if wanted > world_size:
        refuse(f"the program asks for {wanted} ranks and the world has {world_size}", f"give --world {wanted}")
    return world_size


def refuse(what: str, fix: str, where: str = "in the program") -> NoReturn:
    """End this process with a line for the starter, or raise RuntimeError where there is none."""
    if TASK not in os.environ:
        raise RuntimeError(f"{what}, {where}, {fix}")
    (Path(json.loads(os.environ[TASK])["folder"]) / "refused.json").write_text(json.dumps([what, where, fix]))
    os._exit(2)


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


def answer_for_peers() -> None:
    """Replace gloo, and the calls whose result comes from a peer, under every name that a module has for them."""
    names = vars(distributed_c10d)
    answers: dict[str, Callable[..., Any]] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "split_group": _split_group,
        "all_gather_object": _gather_object,
        "gather": _gather,
        "gather_object": _gather_object,
        "broadcast_object_list": _nothing,
        "scatter_object_list": _scatter_object_list,
        "send_object_list": _send_object_list,
        "recv_object_list": _recv_object_list,
        "isend": _send,
        "send": _send,
        "irecv": _receive,
        "recv": _receive,
        "monitored_barrier": _nothing,
    }
    # A torch before 2.4 may lack split_group.
    for name in filter(names.__contains__, answers):
        original, stand_in = names[name], partial(answers[name], names[name])
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, stand_in)


def _init_process_group(original: Any, *args: Any, **options: Any) -> Any:
    """Begin a group with a lone store, for libraries that begin a group of their own."""
    given = inspect.signature(original).bind(*args, **options).arguments
    world_size = check_ranks(given.get("world_size", -1))
    for name in ("init_method", "device_id"):
        given.pop(name, None)
    given["backend"] = (given.get("backend") or "cpu:gloo,cuda:nccl").replace("gloo", "fake")
    given.update(store=LoneStore(), rank=int(os.environ.get("RANK", "0")), world_size=world_size)
    return original(**given)


def _new_group(
    original: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any
) -> Any:
    with _splitting([ranks or range(dist.get_world_size())], dist.get_rank()):
        return original(ranks, timeout, backend and backend.replace("gloo", "fake"), *args, **options)


def _split_group(original: Any, parent_pg: Any = None, split_ranks: Any = None, *args: Any, **options: Any) -> Any:
    with _splitting(split_ranks or [], dist.get_rank(parent_pg)):
        return original(parent_pg, split_ranks, *args, **options)


@contextmanager
def _splitting(groups: Sequence[Sequence[int]], rank: int) -> Iterator[None]:
    """Tell the mock of NCCL how many ranks share what torch may split: since 2.15 it splits for every new group."""
    own = next((sorted(ranks) for ranks in groups if rank in ranks), [rank])
    ctypes.CDLL(None).mock_split(len(own), own.index(rank))
    yield
    ctypes.CDLL(None).mock_split(0, 0)


def _gather(original: Any, tensor: Any, gather_list: list[Any] | None = None, *args: Any, **options: Any) -> Any:
    work = original(tensor, gather_list, *args, **options)
    for each in gather_list or ():
        each.copy_(tensor)
    return work


def _nothing(original: Any, *args: Any, **options: Any) -> None: ...


def _gather_object(original: Any, *args: Any, **options: Any) -> None:
    """Answer all_gather_object or gather_object here: torch 2.15 finds the largest size on the device, which computes nothing."""
    given = inspect.signature(original).bind(*args, **options).arguments
    # A rank that is not in the group has a negative number of ranks.
    pickled, ranks = pickle.dumps(given["obj"]), max(0, dist.get_world_size(given.get("group")))
    if gathered := given.get("object_list") or given.get("object_gather_list"):
        gathered[:ranks] = [pickle.loads(pickled) for _ in range(ranks)]


def _scatter_object_list(original: Any, *args: Any, **options: Any) -> None:
    given = inspect.signature(original).bind(*args, **options).arguments
    if objects := given.get("scatter_object_input_list"):
        given["scatter_object_output_list"][0] = objects[dist.get_rank(given.get("group"))]


def _send_object_list(
    original: Any, object_list: Any, dst: Any = None, group: Any = None, *args: Any, **options: Any
) -> None:
    rank = _note_peer(dst, options.get("group_dst"), group)
    with _objects(dist.get_rank(), rank, _objects_to[rank]).open("wb") as file:
        pickle.dump(object_list, file)
    _objects_to[rank] += 1


def _recv_object_list(
    original: Any, object_list: Any, src: Any = None, group: Any = None, *args: Any, **options: Any
) -> int:
    rank, me = _global_rank(src, options.get("group_src"), group), dist.get_rank()
    file = _objects(rank, me, _objects_from[rank])
    if not file.exists():
        refuse(f"rank {me} needs objects that rank {rank} sends it", "give --rank all-stages, beginning with the first")
    object_list[:] = pickle.loads(file.read_bytes())
    _objects_from[rank] += 1
    return rank


def _objects(source: int, destination: int, number: int) -> Path:
    """Return the file of a list of objects from one rank to another, which the simulation of the other reads."""
    return Path(json.loads(os.environ[TASK])["inbox"]) / f"objects.{source}.{destination}.{number}"


def _send(original: Any, tensor: Any, dst: int | None = None, group: Any = None, *args: Any, **options: Any) -> Any:
    mark(f"to {_note_peer(dst, options.get('group_dst'), group)}")
    return original(tensor, dst, group, *args, **options)


def _receive(original: Any, tensor: Any, src: int | None = None, group: Any = None, *args: Any, **options: Any) -> Any:
    if src is not None or options.get("group_src") is not None:
        mark(f"from {_global_rank(src, options.get('group_src'), group)}")
    return original(tensor, src, group, *args, **options)


def mark(name: str) -> None:
    """Add a mark to the list of the mock, if this process has it: whom the next message is for, or what the host does."""
    if hasattr(_mock, "mock_mark"):
        _mock.mock_mark(name.encode())


def _global_rank(rank: int | None, group_rank: int | None, group: Any) -> int:
    world: Any = dist.group.WORLD
    return dist.get_global_rank(group or world, group_rank or 0) if rank is None else rank


def _note_peer(dst: int | None, group_dst: int | None, group: Any) -> int:
    """Return a peer's rank in the world, and tell the starter, once, that this rank sends to it."""
    rank = _global_rank(dst, group_dst, group)
    if rank not in _sent_to and TASK in os.environ:
        _sent_to.add(rank)
        with (Path(json.loads(os.environ[TASK])["folder"]) / "sends_to").open("a") as file:
            file.write(f"{rank}\n")
    return rank


def begin(torch_module: Any) -> None:
    """Let this program, which has just imported torch, run as the one rank that is there."""
    answer_for_peers()
    setattr(torch.multiprocessing, "spawn", _spawn)  # noqa: B010


def _spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *join: Any, **options: Any) -> None:
    """Be the one of the spawned ranks that is there."""
    check_ranks(nprocs)
    function(int(os.environ.get("LOCAL_RANK", "0")), *args)


def become(command: list[str], world_size: int, ranks_per_node: int) -> NoReturn:
    """Replace a launcher by the one of its ranks that is there."""
    task = json.loads(os.environ[TASK])
    if task["world"] and world_size > task["world"]:
        refuse(f"the launcher asks for {world_size} ranks", f"give --world {world_size}, or leave --world out")
    world_size = task["world"] or world_size
    rank = world_size - 1 if task["rank"] == "last" else int(task["rank"])
    if rank >= world_size:
        refuse(f"no such rank: {rank}", f"use numbers from 0 to {world_size - 1}")
    os.environ.update(environment_of(rank, world_size, ranks_per_node), **TORCHRUN)
    os.environ["GPTSCALE_MOCK_DEVICES"] = str(ranks_per_node)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks_per_node)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execvp(command[0], command)


def launch_torchrun(module: Any) -> None:
    """Let torchrun, or who uses its agent, become the one rank that is there."""

    def launch_agent(config: Any, entrypoint: Any, args: list[Any], **options: Any) -> Any:
        world_size = config.max_nodes * config.nproc_per_node
        if callable(entrypoint):
            check_ranks(world_size)
            return {0: entrypoint(*args)}
        become([entrypoint, *args], world_size, config.nproc_per_node)

    module.launch_agent = launch_agent


def know_gradients(module: Any) -> None:
    """Let a stage derive what gradients it will get: torch 2.15 asks the next stage, which is simulated later."""
    ask: Any = getattr(module.PipelineStage, "_recv_meta", None)

    def answer(stage: Any, other: int) -> Any:
        if other < stage.stage_index:
            return ask(stage, other)
        _objects_from[stage._resolve_peer_global_rank(other)] += 1
        # The gradient of a distributed tensor is taken to lie as the tensor does. Torch would derive none.
        outputs = stage._stage_meta.outputs
        gradients = (replace(meta, requires_grad=False) if meta.requires_grad else None for meta in outputs)
        return module._StageBackwardMeta(tuple(gradients))

    if ask:
        module.PipelineStage._recv_meta = answer


def launch_accelerate(module: Any) -> None:
    """Let `accelerate launch` with one process become it, instead of waiting for it. With more it is torchrun."""
    prepare = module.prepare_simple_launcher_cmd_env

    def become_it(args: Any) -> NoReturn:
        command, environ = prepare(args)
        os.environ.update(environ)
        become(command, 1, 1)

    module.prepare_simple_launcher_cmd_env = become_it


def launch_deepspeed(module: Any) -> None:
    """Let DeepSpeed's launcher become the one rank that is there."""

    def main(args: Any = None) -> NoReturn:
        words = module.parse_args(args)
        per_node = words.num_gpus if words.num_gpus > 0 else torch.cuda.device_count()
        nodes = max(1, words.num_nodes)
        local = () if words.no_local_rank else ("--local_rank=0",)
        program = [sys.executable, "-u", *(["-m"] if words.module else []), words.user_script]
        become([*program, *local, *words.user_args], nodes * per_node, per_node)

    module.main = main
