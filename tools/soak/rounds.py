"""The rounds of a soak: one broken run of each recipe, again and again."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from tools.soak import report
from tools.soak.broken_run import BrokenRun, Outcome, unbroken_run
from tools.soak.disk import SmallDisk
from tools.soak.faults import Fault
from tools.soak.work import SoakWork

FAULTS_PER_RUN = 5


def soak(
    works: Sequence[SoakWork],
    faults: Sequence[Fault],
    out: Path,
    disk: SmallDisk | None,
    *,
    n_runs: int | None,
    limit_s: float,
) -> Iterator[list[Outcome]]:
    """Break a run of each recipe in turn, and yield for each run how it ended each time.

    n_runs: how many of each recipe, None for as many as there is time for. limit_s: no run is begun after so many seconds.
    """
    deadline = time.monotonic() + limit_s
    unbroken: dict[SoakWork, Path] = {}
    for index in itertools.count() if n_runs is None else range(n_runs):
        for recipe_work in works:
            if time.monotonic() > deadline:
                return
            work = recipe_work.with_options(index, out)
            if work not in unbroken:
                unbroken[work] = unbroken_run(work, out / f"{work.recipe}-{index}-unbroken")
            name = f"{work.recipe}-{index}"
            its_faults = drawn([fault for fault in faults if work.nproc > 1 or not fault.peers], work, index)
            its_disk = disk if any(fault.fills for fault in its_faults) else None
            run = BrokenRun(work, out / name, its_disk)
            ended = run.carry_out(its_faults, unbroken[work], f"{work.seed} {name}")
            if report.as_promised(ended):
                shutil.rmtree(run.folder)
            yield ended


def drawn(faults: Sequence[Fault], work: SoakWork, index: int) -> list[Fault]:
    """Return the faults of a recipe's run number `index`: all kinds come once, in any order, before one comes again.

    In a run, damage comes late, when there are checkpoints to damage, and what strikes at the last step comes last.
    """
    deck: list[Fault] = []
    end = (index + 1) * FAULTS_PER_RUN
    while len(deck) < end:
        deck += Random(f"{work.seed} {work.recipe} {len(deck)}").sample(faults, len(faults))
    return sorted(
        deck[end - FAULTS_PER_RUN : end], key=lambda fault: ("last" in fault.moments, fault.damage is not None)
    )
