"""One rank of a calibration: measures everything of a task together with the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from gptscale.common.measure.contention import MachineClock, taken_fraction
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.model.precision import DTYPES
from gptscale.common.process.begin import begin_process, keep_freed_memory, share_cores
from gptscale.common.process.ending import end_process, report
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.foresight.calibrate.file import CalibratedMachine, MeasuredMachine, Operation, TimedOperation, add, read
from gptscale.foresight.calibrate.options import CalibrateOptions
from gptscale.foresight.calibrate.parts import Timing, time_parts, timings
from gptscale.results import render


def this_machine(device: torch.device, world: int) -> CalibratedMachine:
    """Return what the figures of this machine are filed under."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return CalibratedMachine(device_name(device), torch.__version__.partition("+")[0], threads, world)


def measure(options: CalibrateOptions, world: World) -> MeasuredMachine:
    """Measure all that is asked for, on all ranks at once."""
    device, clock = world.device, MachineClock(world.device)
    measured = MeasuredMachine(this_machine(device, world.world_size))
    timings: dict[Operation, Timing] = {}
    for config in options.runs():
        gpt = config.gpt()
        seq_len = config.seq_len or gpt.block_size
        tokens = (config.micro_batch_size or 1) * seq_len
        for tp in options.tensor_ranks():
            timings |= time_parts(gpt, seq_len, tokens, tp, DTYPES[options.precision], device, options.repeats)
    if world.world_size > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
        timings |= time_collectives(world.world_size, local, device, options.repeats)
    measured.operations = [
        TimedOperation(operation, options.precision, *timing) for operation, timing in timings.items()
    ]
    taken = taken_fraction(gather_objects(clock.lap())) or 0.0
    if world.is_main and taken > TAKEN_MAX:
        print(f"warning: others took {taken:.0%} of the processors meanwhile; measure again on a quiet machine")
    return measured


def as_rank(options: CalibrateOptions) -> NoReturn:
    """Measure together with the other ranks, let the first keep and print the figures, and end this process at once."""
    world = World.from_environment(options.device)
    share_cores()
    keep_freed_memory()
    status = 0
    try:
        with process_group(world) if world.world_size > 1 else nullcontext():
            measured = measure(options, world)
            if world.is_main:
                assert options.out is not None
                add(options.out, measured)
                show(options.out)
            if dist.is_initialized():
                dist.barrier()
    except BaseException as error:
        _, status = report(error, world.rank)
    end_process(status)


def show(path: Path) -> None:
    """Print what was measured last."""
    last = read(path)[-1]
    columns = ("operation", "shape", "ms", "spread")
    rows = [
        (t.operation.kind, " ".join(map(str, t.operation.shape)), f"{t.seconds * 1e3:,.3f}", f"{t.spread:.0%}")
        for t in last.operations
    ]
    console = render.console(130, highlight=False)
    console.print(render.table(columns, rows))
    machine = last.machine
    console.print(f"{machine.device}, torch {machine.torch}, {machine.threads} threads, {machine.world} ranks at once")
    print(f"added to {path}", flush=True)


def main(words: Sequence[str]) -> NoReturn:
    """Measure what the options of the command line ask for, which are JSON."""
    begin_process()
    options = json.loads(words[0])
    as_rank(CalibrateOptions(**options | {"out": Path(options["out"])}))


# Bytes of the sweep: 4 KiB to 64 MiB.
SIZES = tuple(2**n for n in range(12, 27, 2))
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")


def time_collectives(world_size: int, per_node: int, device: torch.device, repeats: int) -> dict[Operation, Timing]:
    """Return the seconds of each collective at each size, which is that of the whole tensor.

    Its shape is the bytes, the ranks, and how many of them are on a node. The groups of a split are measured as they run: all of
    one kind at the same time, so that those that leave a node share its links.
    """
    groups = {shape: _group(shape[0], apart, world_size) for shape, apart in group_shapes(world_size, per_node).items()}
    calls: dict[Operation, Callable[[], object]] = {}
    for size in SIZES:
        for (ranks, on_node), group in groups.items():
            for kind in COLLECTIVES:
                calls[Operation(kind, (size, ranks, on_node))] = collective(kind, size, device, group)
        for on_node in {2, 1} if per_node < world_size else {2}:
            stride = 1 if on_node == 2 else per_node
            calls[Operation("send", (size, 2, on_node))] = _message(size, world_size, stride, device)
    # A send goes there and comes back.
    halves = {"send": 0.5}
    return {
        operation: timing._replace(seconds=timing.seconds * halves.get(operation.kind, 1.0))
        for operation, timing in timings(calls, device, repeats).items()
    }


def group_shapes(world_size: int, per_node: int) -> dict[tuple[int, int], int]:
    """Return how far apart the ranks of a group lie, by their number and how many of them are on a node."""
    shapes: dict[tuple[int, int], int] = {}
    for ranks in range(2, world_size + 1):
        for stride in range(1, world_size // ranks + 1):
            if world_size % (ranks * stride) == 0:
                shapes.setdefault((ranks, min(ranks, -(-per_node // stride))), stride)
    return shapes


def _group(ranks: int, stride: int, world_size: int) -> dist.ProcessGroup:
    """Return this rank's group of ranks that lie `stride` apart. Every rank makes all of them."""
    firsts = [block + i for block in range(0, world_size, ranks * stride) for i in range(stride)]
    members = [[first + stride * i for i in range(ranks)] for first in firsts]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members)[0]  # type: ignore[assignment]
    return group


def collective(kind: str, n_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a call of a collective of a group on a tensor of fp32 numbers."""
    part = torch.zeros(max(1, n_bytes // 4 // group.size()), device=device)
    full = part.new_zeros(part.numel() * group.size())
    if kind == "all-reduce":
        return lambda: dist.all_reduce(full, group=group)
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(full, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, full, group=group)


def _message(n_bytes: int, world_size: int, stride: int, device: torch.device) -> Callable[[], object]:
    """Return a message from each first rank of a pair to the other, `stride` further, and back."""
    tensor, rank = torch.zeros(max(1, n_bytes // 4), device=device), dist.get_rank()
    is_first = rank // stride % 2 == 0
    other = rank + stride if is_first else rank - stride
    turns = (dist.send, dist.recv) if is_first else (dist.recv, dist.send)
    # With an odd number the last has nobody to send to.
    return lambda: [turn(tensor, other) for turn in turns] if other < world_size else None


if __name__ == "__main__":
    main(sys.argv[1:])
