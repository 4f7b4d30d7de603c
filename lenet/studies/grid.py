"""The runs of a study: each cell of its grid by the command, in processes of its own, in turn or several at once."""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.task import run_captured
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.lenet.run.config import RUN_IMPORTS, VisionConfig, imports_of, option_words

if TYPE_CHECKING:
    import pandas as pd

RUN_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class Cell:
    """One configuration of a grid: its name, the options that it changes, and its number of processes.

    accepts: exit statuses beside 0 that are a result and do not end the study.
    """

    variant: str
    options: dict[str, Any]
    nproc: int = 1
    accepts: tuple[int, ...] = ()


def run_grid(
    cells: Sequence[Cell], base: VisionConfig, seeds: Sequence[int], places: Sequence[Mapping[str, str]] = ({},), *,
    download: bool = False,
) -> pd.DataFrame:  # fmt: skip
    """Run every cell with each seed, in turn, and return their rows of lenet.csv in that order.

    All cells are checked before the first run, so that a ConfigError is raised before anything has run.
    base: what all runs share but for the seed. places: the variables of the environment that a run has beside this
    process's. As many runs as there are places go on at once.
    """
    # Before the first import of torch, which the warm parent and its runs then share.
    begin_warm_parent(base.device, RUN_IMPORTS)
    from gptscale.lenet.run.columns import LENET, read_summary

    configs = [dataclasses.replace(base, variant=cell.variant, **cell.options) for cell in cells]
    check(cells, configs, download)
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def run(turn: int, cell: Cell, config: VisionConfig) -> None:
        place = free.get()
        print(f"round {turn + 1} of {len(seeds)}: {cell.variant}", file=sys.stderr, flush=True)
        try:
            run_cell(config, cell, place)
        finally:
            free.put(place)

    runs = [
        (turn, cell, dataclasses.replace(config, seed=seed, run_name=f"{base.study}-{uuid.uuid4().hex[:12]}"))
        for turn, seed in enumerate(seeds)
        for cell, config in zip(cells, configs, strict=True)
    ]
    if len(places) == 1:
        for one in runs:
            run(*one)
    else:
        run_at_once(run, runs, len(places))
    names = [config.run_name for *_, config in runs]
    return read_summary(base.out / LENET.file).set_index("run_id").loc[names].reset_index()


def run_at_once(run: Callable[..., None], runs: Sequence[tuple[Any, ...]], n: int) -> None:
    """Call `run` for each of `runs`, `n` at once, and raise the first error after those that had begun."""
    pool = ThreadPoolExecutor(n)
    try:
        for ended in [pool.submit(run, *one) for one in runs]:
            ended.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check(cells: Sequence[Cell], configs: Sequence[VisionConfig], download: bool) -> None:
    """Raise ConfigError for the first cell that cannot run, after fetching the data if that is asked for."""
    from gptscale.common.process.world import world_of
    from gptscale.lenet.run.preflight import ready_run

    for i, (cell, config) in enumerate(zip(cells, configs, strict=True)):
        world = world_of(config.device, config.dist_timeout_s, cell.nproc)
        # Once, here, and not in each run.
        ready_run(dataclasses.replace(config, download=download and i == 0), world)


def run_cell(config: VisionConfig, cell: Cell, place: Mapping[str, str]) -> None:
    """Train one run by the command, in processes of its own, so that no run shares memory or threads with another."""
    from gptscale.common.process.world import runs_on_cuda

    words = ("lenet", "train", "--nproc", str(cell.nproc), *option_words(config))
    program = Program("gptscale.launchers.cli", words, imports=imports_of(config))
    on_cuda = runs_on_cuda(config.device)
    ended = run_captured(program, timeout=RUN_TIMEOUT_S, environ={**os.environ, **place}, fork=not on_cuda)
    if ended.returncode not in (0, *cell.accepts):
        last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        what = f"{cell.variant} failed ({last_line[:300]})"
        raise GptscaleError(what, "in the study", "see the message of that run")
