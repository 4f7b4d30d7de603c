"""One rank of a calibration: measures everything of a task together with the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gptscale.common.measure.contention import MachineClock, taken_fraction
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.model.precision import DTYPES
from gptscale.common.process.begin import begin_process, keep_freed_memory, share_cores
from gptscale.common.process.ending import report
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.calibrate.file import CalibratedMachine, MeasuredMachine, Operation, TimedOperation, add
from gptscale.foresight.calibrate.links import SIZES, time_collectives
from gptscale.foresight.calibrate.parts import time_parts
from gptscale.foresight.calibrate.timing import Timing


@dataclass(frozen=True)
class CalibrationTask:
    """What to measure. shapes: fields of RunConfig for each micro-batch, of one precision. tp: numbers of tensor ranks."""

    shapes: Sequence[Mapping[str, Any]]
    out: str
    tp: Sequence[int] = (1,)
    device: str = "auto"
    repeats: int = 9


def this_machine(device: torch.device, world: int) -> CalibratedMachine:
    """Return what the figures of this machine are filed under."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return CalibratedMachine(device_name(device), torch.__version__.partition("+")[0], threads, world)


def measure(task: CalibrationTask, world: World) -> MeasuredMachine:
    """Measure all that a task asks for, on all ranks at once."""
    device, clock = world.device, MachineClock(world.device)
    measured = MeasuredMachine(this_machine(device, world.world_size))
    timings: dict[Operation, Timing] = {}
    precision = "fp32"
    for shape in task.shapes:
        config = RunConfig(**{"data": "synthetic", **shape})
        gpt, precision = config.gpt(), config.precision
        seq_len = config.seq_len or gpt.block_size
        tokens = (config.micro_batch_size or 1) * seq_len
        for tp in task.tp:
            timings |= time_parts(gpt, seq_len, tokens, tp, DTYPES[precision], device, task.repeats)
    if world.world_size > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
        timings |= time_collectives(SIZES, world.world_size, local, device, task.repeats)
    measured.operations = [TimedOperation(operation, precision, *timing) for operation, timing in timings.items()]
    taken = taken_fraction(gather_objects(clock.lap())) or 0.0
    if world.is_main and taken > TAKEN_MAX:
        print(f"warning: others took {taken:.0%} of the processors meanwhile; measure again on a quiet machine")
    return measured


def measure_and_keep(task: CalibrationTask, world: World) -> None:
    """Measure a task, and let rank 0 add the figures to its file."""
    measured = measure(task, world)
    if world.is_main:
        add(Path(task.out), measured)


def as_rank(device: str, measure_and_leave: Callable[[World], None]) -> NoReturn:
    """Measure together with the other ranks, and end this process at once.

    Libraries' threads may hang in the interpreter's teardown.
    """
    world = World.from_environment(device)
    share_cores()
    keep_freed_memory()
    status = 0
    try:
        with process_group(world) if world.world_size > 1 else nullcontext():
            measure_and_leave(world)
            if dist.is_initialized():
                dist.barrier()
    except BaseException as error:
        _, status = report(error, world.rank)
    sys.stdout.flush()
    os._exit(status)


def main(words: Sequence[str]) -> NoReturn:
    """Measure the task of the command line."""
    begin_process()
    task = CalibrationTask(**json.loads(words[0]))
    as_rank(task.device, lambda world: measure_and_keep(task, world))


if __name__ == "__main__":
    main(sys.argv[1:])
