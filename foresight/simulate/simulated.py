"""One rank of a world that is not there, under the mock of CUDA: a run's own program, of which only the memory is kept.

`gptscale simulate` starts this as a process of its own. It trains for a few steps as a run does, with the run's data, engine and
loop, and leaves what the allocator did and what the device was asked to do in a folder. Losses and times are not read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptscale.common.data.loader import Prefetcher
from gptscale.common.engine import Engine, StepResult
from gptscale.common.errors import GptscaleError
from gptscale.common.process.begin import begin_process, share_cores
from gptscale.common.process.ending import is_out_of_memory, report
from gptscale.common.process.mock import simulating
from gptscale.common.process.world import World
from gptscale.common.train import train
from gptscale.foresight.memory.closed_form import predict
from gptscale.foresight.memory.owners import FORWARD, Owners
from gptscale.foresight.memory.saved import save_timeline
from gptscale.foresight.memory.timeline import read_timeline
from gptscale.foresight.mock_cuda import library
from gptscale.foresight.mock_cuda.boot import WATCHDOG_S
from gptscale.foresight.mock_cuda.counter import CudaCounter
from gptscale.foresight.mock_cuda.host import know_what_peers_send, leave_out, lone_group
from gptscale.foresight.simulate.simulation import OOM_EXIT_STATUS
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import ReadyRun, preflight
from gptscale.recipes import get

# The first step makes the optimizer's state, and DDP orders its buckets anew after it. The second is as all that follow.
STEPS = 2
# Further steps that nobody follows, to time how long the host takes to ask for one, but not for longer than this.
TIMED_STEPS, TIMED_S = 3, 3.0


class StepMarks:
    """The loop's observer: it notes where steps begin, and reads nothing from the device."""

    def __init__(self, counter: CudaCounter) -> None:
        self.counter = counter
        self.begins: list[int] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        library.mark(f"step {len(self.begins)}")
        self.begins.append(self.counter.now())
        yield

    def step(self, step: int, lr: float, result: StepResult) -> bool:
        library.mark("step ends")
        if dist.is_initialized():
            time.sleep(WATCHDOG_S)
        return False

    def evaluated(self, step: int, loss: torch.Tensor) -> None: ...

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


def main(argv: list[str]) -> int:
    """Simulate the rank that the environment names.

    argv: the folder for the results, the recipe, and the run's options.
    """
    folder, recipe, *words = argv
    begin_process()
    leave_out()
    with simulating():
        try:
            config, recipe_config = parse_run(recipe, words)
            ready = preflight(recipe, config, recipe_config, World.from_environment("cuda", config.dist_timeout_s))
        except GptscaleError as error:
            print(f"gptscale: error: {error}", file=sys.stderr, flush=True)
            return 2
        share_cores()
        return _simulate(ready, Path(folder))


def _simulate(ready: ReadyRun, folder: Path) -> int:
    run = ready.run
    counter = CudaCounter(run.world.device)
    owners = Owners(counter)
    marks = StepMarks(counter)
    facts: dict[str, Any] = {"recipe": run.recipe, "rank": run.world.rank, "world_size": run.world.world_size}
    status = 0
    with ExitStack() as stack:
        # zero_infinity makes its folder there.
        run.config.out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lone_group(run.world) if get(run.recipe).axes else nullcontext())
        torch.cuda.init()
        capability, _ = torch.cuda.get_device_capability(run.world.device)
        facts["closed_form_bytes"] = predict(run, ready.recipe_config, capability)
        watching = stack.enter_context(ExitStack())
        try:
            watching.enter_context(owners.watching())
            with counter.counting(), library.listing(folder / "calls.tsv"):
                engine = get(run.recipe).load().build(run, ready.recipe_config)
                stack.callback(engine.close)
                if hasattr(engine, "plugin"):
                    know_what_peers_send(run, engine)
                owners.of_engine(engine)
                batches = ready.batches(ready.train, engine.data_rank, engine.data_size)
                data = stack.enter_context(Prefetcher(batches, run.world.device))
                with owners.part(FORWARD):
                    train(engine, data, marks, lr_at=run.lr_at, start=0, steps=STEPS)
                owners.label_state(engine)
            owners.rest()
            # Compiled code depends on the hooks. Without them it would be compiled again within the steps that are timed.
            if not run.config.compile:
                watching.close()
            # Before the steps that nobody waits for, whose collectives' tensors live on until NCCL's watchdog comes by.
            facts |= _peaks(run.world.device)
            if state := engine.live_state():
                facts["state"] = asdict(state)
            facts["host_s"] = _issue_time_s(engine, data)
        except BaseException as error:
            if is_out_of_memory(error):
                facts["out_of_memory"] = str(error).splitlines()[0]
                facts |= _peaks(run.world.device)
                status = OOM_EXIT_STATUS
            else:
                _, status = report(error, run.world.rank)
                stack.pop_all()
                return status
    timeline = read_timeline(counter.events(), owners, marks.begins)
    facts |= {
        "communicators": library.communicators(),
        "device": torch.cuda.get_device_name(run.world.device),
        "device_memory": torch.cuda.get_device_properties(run.world.device).total_memory,
        "peak_counted": timeline.peak,
        "peak_part": timeline.part_at(timeline.peak_at),
        "peak_by_owner": timeline.by_owner(timeline.peak_at),
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    save_timeline(timeline, folder / "timeline.npz")
    return status


def _peaks(device: torch.device) -> dict[str, int]:
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "peak_taken": library.device_peak_bytes(device.index or 0),
        "peak_pinned": library.pinned_peak_bytes(),
        "peak_host": library.host_peak_bytes() + own_host_bytes(),
    }


def _issue_time_s(engine: Engine, data: Prefetcher) -> float:
    """Return the least seconds that the host needs to ask for a step: a device that is faster has to wait for it."""
    times_s = []
    for step in range(STEPS, STEPS + TIMED_STEPS):
        batch, began = data.get(step), time.perf_counter()
        engine.train_step(batch, 1e-4)
        times_s.append(time.perf_counter() - began)
        if sum(times_s) > TIMED_S:
            break
    return min(times_s)


def own_host_bytes() -> int:
    """Return the bytes of this process in memory, without what it shares with others and without its files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries wait for peers that are not there.
    os._exit(status)
