"""One rank of the accuracy of times: layers timed alone, and whole steps of each recipe as runs take them, in turn."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from benchmarks.foresight.times.shapes import plan_of
from gptscale.common.data.loader import Prefetcher
from gptscale.common.engine import Engine
from gptscale.common.measure.contention import MachineClock, taken_fraction
from gptscale.common.measure.speed import synchronize
from gptscale.common.process.begin import begin_process
from gptscale.common.process.world import World, gather_objects
from gptscale.common.train import train
from gptscale.foresight.calibrate import file, machine, worker
from gptscale.foresight.calibrate.host import time_host
from gptscale.foresight.calibrate.layer_operations import layer_operations
from gptscale.foresight.calibrate.layers import WHOLE, LayerProbe, run_of
from gptscale.foresight.calibrate.links import time_collectives
from gptscale.foresight.calibrate.stages import time_stage
from gptscale.foresight.calibrate.steps import PLAIN, step_here
from gptscale.foresight.time.data_sheets import GLOO, HERE
from gptscale.foresight.time.operations import MessageShape
from gptscale.foresight.time.work import Operation
from gptscale.launchers.run.preflight import ReadyRun
from gptscale.recipes import get
from gptscale.results.record.recorder import Recorder

BLOCK_STEPS = 4
SMALL = 4096


class RecipeLoop:
    """A recipe with all that a run has around it, stepped a block at a time."""

    def __init__(self, plan: ReadyRun, folder: Path, stack: ExitStack) -> None:
        self.run, self.start = plan.run, 0
        self.seconds: list[float] = []
        self.engine: Engine = get(self.run.recipe).load().build(self.run, plan.recipe_config)
        stack.callback(self.engine.close)
        batches = plan.batches(plan.train, self.engine.data_rank, self.engine.data_size)
        own = folder / f"{self.run.recipe}-{self.run.world.rank}"
        own.mkdir()
        self.recorder = stack.enter_context(Recorder(self.run, own))
        self.data = stack.enter_context(Prefetcher(batches, self.run.world.device))

    def block(self) -> None:
        """Take a few steps, of which the first is not timed: it finds the caches as others left them."""
        self._train(1)
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        self._train(BLOCK_STEPS)
        synchronize(self.run.world.device)
        self.seconds.append((time.perf_counter() - began) / BLOCK_STEPS)

    def _train(self, steps: int) -> None:
        begin, self.start = self.start, self.start + steps
        train(self.engine, self.data, self.recorder, lr_at=self.run.lr_at, start=begin, steps=self.start)


def measure(task: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """Calibrate a shape's layers and run its recipes, in turn, and return a row for each recipe.

    What was calibrated is added to the file of the task.
    """
    folder, clock, rounds = Path(task["folder"]), MachineClock(world.device), task["rounds"]
    plans = {name: plan_of(name, task["shape"], rounds * (BLOCK_STEPS + 1), folder, world) for name in task["recipes"]}
    measured = file.MeasuredMachine(machine.this_machine(world.device, world.world_size))
    steps = [step_here(plan.run, plan.recipe_config) for plan in plans.values()]
    operations = {operation for step in steps for operation in step.operations()}
    config = next(iter(plans.values())).run.config
    timings = calibrate_apart(operations, config, world, folder)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        stack.enter_context(redirect_stderr(StringIO()))
        probes = [
            LayerProbe(names, dataclasses.replace(config, micro_batch_size=size), world)
            for size, names in probes_of(plans).items()
        ]
        loops = {name: RecipeLoop(plan, folder, stack) for name, plan in plans.items()}
        for _ in range(rounds):
            for probe in probes:
                probe.round()
            for loop in loops.values():
                loop.block()
    for probe in probes:
        timings |= layer_operations(probe, HERE)
        probe.close()
    worker.add(measured, config.precision, timings)
    taken_share = taken_fraction(gather_objects(clock.lap())) or 0.0
    if world.is_main:
        file.add(Path(task["calibration"]), measured)
    # The first block warms up.
    return [
        {
            "recipe": name,
            "measured_s": statistics.median(loop.seconds[1:]),
            "measured_p10_s": statistics.quantiles(loop.seconds[1:], n=10)[0],
            "measured_p90_s": statistics.quantiles(loop.seconds[1:], n=10)[-1],
            "threads": measured.machine.threads,
            "taken_fraction": taken_share,
        }
        for name, loop in loops.items()
    ]


def probes_of(plans: dict[str, ReadyRun]) -> dict[int, list[str]]:
    """Return the recipes whose layers are timed, by micro-batch. Some hold the plain model's."""
    sizes: dict[int, list[str]] = {}
    for name, plan in plans.items():
        layers = WHOLE if name in PLAIN else name
        names = sizes.setdefault(plan.run.batch.micro_batch_size, [])
        if layers not in names:
            names.append(layers)
    return sizes


def calibrate_apart(operations: set[Operation], config: Any, world: World, folder: Path) -> dict[Operation, Any]:
    """Return the seconds of what needs no layers: host, optimizer, messages and stages."""
    device, repeats = world.device, 15
    size = config.micro_batch_size or 4
    host = run_of(WHOLE if world.world_size == 1 else "ddp", dataclasses.replace(config, micro_batch_size=size), world)
    timings = {Operation("host", (), HERE): time_host(host, folder)}
    timings |= worker.time_optimizer(config.gpt().n_layer, config, world, HERE, repeats)
    if world.world_size > 1:
        sizes = sorted({operation.shape[0] for operation in operations if operation.on == GLOO} | {SMALL})
        messages = time_collectives(sizes, world.world_size, world.world_size, device, GLOO, repeats)
        small = messages[Operation("send", MessageShape(SMALL, 2, 2, 1), GLOO)].seconds
        timings |= messages | {Operation("stage", (), HERE): time_stage(world.world_size, device, small, repeats)}
    return timings


def main(words: Sequence[str]) -> NoReturn:
    """Measure the task of the command line. Rank 0 leaves the rows in its folder."""
    begin_process()
    task = json.loads(words[0])

    def measure_and_leave(world: World) -> None:
        rows = measure(task, world)
        if world.is_main:
            (Path(task["folder"]) / "rows.json").write_text(json.dumps(rows))

    worker.as_rank("cpu", measure_and_leave)


if __name__ == "__main__":
    main(sys.argv[1:])
