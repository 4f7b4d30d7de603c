"""A recipe as a simulated program: a run's own data, engine and loop, for two steps. Losses and times are not read.

Further steps, which nobody watches, say how long the host takes to ask for one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import torch

from gptscale.common.data.loader import Prefetcher
from gptscale.common.engine import Engine, StepResult
from gptscale.common.errors import GptscaleError
from gptscale.common.process.begin import begin_process, share_cores
from gptscale.common.process.ending import end_process
from gptscale.common.process.mock import simulating
from gptscale.common.process.world import World
from gptscale.common.train import train
from gptscale.foresight.mock_cuda.boot import TASK, refuse
from gptscale.foresight.mock_cuda.host import begin_lone_group, know_what_peers_send, leave_out
from gptscale.foresight.mock_cuda.watch import RECIPE_FACTS, clocks, least_passed
from gptscale.launchers.run.options import parse_run
from gptscale.launchers.run.preflight import ReadyRun, preflight
from gptscale.recipes import get

# Steps to time, but not for longer than this.
TIMED_STEPS, TIMED_S = 3, 3.0


class Unobserved:
    """The loop's observer, which reads nothing from the device."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    paused = waiting

    def step(self, step: int, lr: float, result: StepResult) -> bool:
        return False

    def evaluated(self, step: int, loss: torch.Tensor) -> None: ...


def main(argv: list[str]) -> None:
    """Be the rank that the environment names. argv: the recipe, and the run's options."""
    recipe, *words = argv
    task = json.loads(os.environ[TASK])
    folder = Path(task["folder"])
    begin_process()
    leave_out()
    with simulating():
        try:
            config, recipe_config = parse_run(recipe, words)
            # zero_infinity makes its folder there.
            config = dataclasses.replace(config, out=folder / "out")
            ready = preflight(recipe, config, recipe_config, World.from_environment("cuda", config.dist_timeout_s))
        except GptscaleError as error:
            refuse(error.what, error.fix, error.where)
        share_cores()
        ready.run.config.out.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE_FACTS).write_text(json.dumps(_train(ready, task["steps"])))


def _train(ready: ReadyRun, steps: int) -> dict[str, object]:
    """Train, and return the bytes of state that the engine holds, and the host's seconds for a step."""
    run = ready.run
    if get(run.recipe).axes:
        begin_lone_group(run.world)
    with closing(get(run.recipe).load().build(run, ready.recipe_config)) as engine:
        if hasattr(engine, "plugin"):
            know_what_peers_send(run, engine)
        batches = ready.batches(ready.train, engine.data_rank, engine.data_size)
        with Prefetcher(batches, run.world.device) as data:
            train(engine, data, Unobserved(), lr_at=run.lr_at, start=0, steps=steps)
            state = engine.live_state()
            return {"state": state and dataclasses.asdict(state), "host_s": _issue_time_s(engine, data, steps)}


def _issue_time_s(engine: Engine, data: Prefetcher, begin: int) -> float:
    """Return the least seconds that the host needs to ask for a step: a device that is faster has to wait for it."""
    times_s = []
    for step in range(begin, begin + TIMED_STEPS):
        batch, began = data.get(step), clocks()
        engine.train_step(batch, 1e-4)
        times_s.append(least_passed(began))
        if sum(times_s) > TIMED_S:
            break
    return min(times_s)


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1:])
    except BaseException:
        # It is foresight/mock_cuda/watch.py that notes the error.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    # Threads of libraries wait for peers that are not there.
    end_process(status)
