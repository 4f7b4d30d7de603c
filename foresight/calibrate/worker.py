"""One rank of a calibration: measures everything of a task together with the others."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gptscale.common.measure.contention import MachineClock, taken_fraction
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.model.precision import DTYPES
from gptscale.common.optim.fused import FusedOptimizer
from gptscale.common.process.begin import begin_process, keep_freed_memory, share_cores
from gptscale.common.process.ending import report
from gptscale.common.process.world import World, gather_objects, process_group
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.calibrate import file, machine
from gptscale.foresight.calibrate.host import time_host
from gptscale.foresight.calibrate.layer_operations import elementwise_operation, layer_operations
from gptscale.foresight.calibrate.layers import WHOLE, LayerProbe, run_of
from gptscale.foresight.calibrate.links import SIZES, contention, time_collectives
from gptscale.foresight.calibrate.parts import time_parts
from gptscale.foresight.calibrate.stages import time_stage
from gptscale.foresight.calibrate.steps import block_parameters
from gptscale.foresight.calibrate.timing import WARM_UP, Timing, timings
from gptscale.foresight.time.data_sheets import GLOO, HERE, NCCL
from gptscale.foresight.time.operations import MessageShape, StateShape
from gptscale.foresight.time.work import Operation

# Parameters of a block above which two blocks say as much about the optimizer as six.
LARGE_BLOCK = 5_000_000


@dataclass(frozen=True)
class CalibrationTask:
    """What to measure.

    shapes: fields of RunConfig for each micro-batch, of one precision. recipes: those whose layers are timed. tp: numbers of
    tensor ranks. on, link: the names that figures are filed under, "" for the usual link. disk: a folder on the disk that is
    measured, "" for that of temporary files. sweep: collectives, copies and disk too.
    """

    shapes: Sequence[Mapping[str, Any]]
    recipes: Sequence[str]
    out: str
    tp: Sequence[int] = (1,)
    device: str = "auto"
    on: str = HERE
    link: str = ""
    disk: str = ""
    repeats: int = 9
    sweep: bool = True

    def link_on(self, device: torch.device) -> str:
        """Return the name of the link."""
        return self.link or (NCCL if device.type == "cuda" else GLOO)


def measure(task: CalibrationTask, world: World, folder: Path) -> file.MeasuredMachine:
    """Measure all that a task asks for, on all ranks at once."""
    device, clock = world.device, MachineClock(world.device)
    measured = file.MeasuredMachine(machine.this_machine(device, world.world_size))
    link, many = task.link_on(device), world.world_size > 1
    for i, shape in enumerate(task.shapes):
        # State that recipes keep in files goes into the folder.
        config = RunConfig(**{"data": "synthetic", "out": folder, **shape})
        add(measured, config.precision, time_layers(task, config, world))
        if i == 0:
            add(measured, config.precision, time_rest(task, config, world, folder))
    if many and task.sweep:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world.world_size))
        collectives = time_collectives(SIZES, world.world_size, local, device, link, task.repeats)
        facts = contention(device, task.repeats)
        small = collectives[Operation("send", MessageShape(SIZES[0], 2, min(2, local), 1), link)]
        stage = time_stage(world.world_size, device, small.seconds, task.repeats)
        add(measured, config.precision, collectives | {Operation("stage", (), task.on): stage})
        measured.facts += facts
    if task.sweep:
        disk = machine.time_disk(folder, task.on) if world.is_main else {}
        copies = machine.time_copies(device, task.on, task.repeats)
        add(measured, config.precision, copies | disk)
        measured.facts += machine.facts(device, task.repeats)
    taken = taken_fraction(gather_objects(clock.lap())) or 0.0
    measured.facts.append(file.MachineFact("taken by others", taken, "share"))
    return measured


def time_layers(task: CalibrationTask, config: RunConfig, world: World) -> dict[Operation, Timing]:
    """Return the seconds of the layers of one micro-batch, and of their parts."""
    run = run_of(WHOLE, config, dataclasses.replace(world, world_size=1))
    tokens, dtype = run.batch.micro_batch_size * run.seq_len, DTYPES[config.precision]
    timings: dict[Operation, Timing] = {}
    for tp in task.tp:
        timings |= time_parts(run.gpt, run.seq_len, tokens, tp, dtype, world.device, task.on, task.repeats)
        names, cut = [WHOLE, *(task.recipes if tp == task.tp[0] else ())], dataclasses.replace(config, tp_size=tp)
        probe = LayerProbe(names, cut, world, accumulates=tp == task.tp[0])
        again = LayerProbe([WHOLE], dataclasses.replace(cut, activation_checkpointing="selective"), world)
        for _ in range(task.repeats + WARM_UP):
            probe.round()
            again.round()
        timings |= layer_operations(probe, task.on) | elementwise_operation(probe, again, task.on)
        probe.close()
        again.close()
    return timings


def time_rest(task: CalibrationTask, config: RunConfig, world: World, folder: Path) -> dict[Operation, Timing]:
    """Return the seconds of what does not depend on the micro-batch: the host's part and the optimizer."""
    run = run_of(WHOLE if world.world_size == 1 else "ddp", config, world)
    timings = time_optimizer(run.gpt.n_layer, config, world, task.on, task.repeats)
    return timings | {Operation("host", (), task.on): time_host(run, folder)}


def time_optimizer(n_layer: int, config: RunConfig, world: World, on: str, repeats: int) -> dict[Operation, Timing]:
    """Return the seconds of the package's own step (norm, clipping, AdamW) of some blocks, with and without tables.

    A pipeline's rank has any number of blocks. Of large ones, few are timed, for they are alike and take memory.
    """
    gpt, device = config.gpt(), world.device
    vectors = [(3 * gpt.n_embd,), (4 * gpt.n_embd,), *[(gpt.n_embd,)] * 6]
    matrices = [
        (3 * gpt.n_embd, gpt.n_embd),
        (gpt.n_embd, gpt.n_embd),
        (4 * gpt.n_embd, gpt.n_embd),
        (gpt.n_embd, 4 * gpt.n_embd),
    ]
    table = [(gpt.padded_vocab_size, gpt.n_embd)]
    rest = [*table, (gpt.block_size, gpt.n_embd), (2 * gpt.n_embd,)]
    calls: dict[Operation, Callable[[], object]] = {}
    most = min(n_layer, 6 if block_parameters(gpt) < LARGE_BLOCK else 2)
    for blocks in range(1, most + 1):
        for others in (rest, table, []):
            shapes = [*(vectors + matrices) * blocks, *others]
            numel = sum(torch.Size(shape).numel() for shape in shapes)
            parameters = {
                str(i): torch.nn.Parameter(torch.zeros(shape, device=device)) for i, shape in enumerate(shapes)
            }
            grads = [torch.full_like(p, 1e-3) for p in parameters.values()]
            stepper, one = FusedOptimizer(parameters, config), torch.ones((), device=device)

            def step(parameters=parameters, grads=grads, stepper=stepper, one=one) -> None:  # type: ignore[no-untyped-def]
                for p, grad in zip(parameters.values(), grads, strict=True):
                    p.grad = grad
                stepper.step(1e-4, one)

            calls[Operation("optimizer", StateShape(numel), on)] = step
    assert block_parameters(gpt) == sum(torch.Size(shape).numel() for shape in vectors + matrices)
    return timings(calls, device, repeats)


def add(measured: file.MeasuredMachine, precision: str, times: Mapping[Operation, Timing]) -> None:
    """File timings under a precision."""
    measured.operations += [
        file.TimedOperation(operation, precision, t.seconds, t.spread, t.repeats) for operation, t in times.items()
    ]


def busy(measured: Iterable[file.MachineFact]) -> float:
    """Return the share of the machine that others took, if it was too much, else 0."""
    taken = max((fact.value for fact in measured if fact.name == "taken by others"), default=0.0)
    return taken if taken > TAKEN_MAX else 0.0


def measure_and_keep(task: CalibrationTask, world: World) -> None:
    """Measure a task, and let rank 0 add the figures to its file."""
    with tempfile.TemporaryDirectory(dir=task.disk or None) as folder:
        measured = measure(task, world, Path(folder))
    if world.is_main:
        file.add(Path(task.out), measured)


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
