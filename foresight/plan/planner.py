"""The planner: list what is valid, leave out what does not fit, predict the time of the rest, sort."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.settings.run_config import RunConfig
from gptscale.foresight.calibrate.costs import cost_table
from gptscale.foresight.calibrate.file import CalibratedMachine
from gptscale.foresight.calibrate.steps import is_written
from gptscale.foresight.plan.enumeration import Candidate, enumerate_runs
from gptscale.foresight.plan.limits import without_each
from gptscale.foresight.plan.question import Cluster, Resolve
from gptscale.foresight.plan.rows import PlannedRow, StepTime, places_of
from gptscale.foresight.plan.steps import estimated_work, n_items, steps_of
from gptscale.foresight.time.calibration import DATA_SHEET, FAR, CostTable
from gptscale.foresight.time.simulator import seconds_of
from gptscale.foresight.time.split import Machines
from gptscale.foresight.time.work import Operation, StepWork
from gptscale.recipes import RECIPES

# With measurements of the device at hand, a time that is known less well than this is refused.
REFUSED_ABOVE = 0.25
# So many rows are played in all, and of each recipe and mesh. Steps of more items take long to play: very many micro-batches.
PLAYED, PLAYED_OF_SPLIT, LONGEST = 200, 8, 8_000
# A row with this share of the fastest row's speed is as good: no prediction of its grade can tell more.
AS_GOOD, AS_GOOD_BY_DATA_SHEET = 0.98, 0.95
Written = tuple[list[StepWork], int]


@dataclass
class WorkPlan:
    """All rows that fit, the fastest first, and what does not.

    nearest: the row that lacks least, if none fits. left_out: recipes that were not listed, with the reason.
    """

    cluster: Cluster
    config: RunConfig
    rows: list[PlannedRow]
    nearest: PlannedRow | None
    listed: int
    left_out: dict[str, str]
    costs: CostTable | None = field(default=None, repr=False)

    @property
    def best(self) -> list[PlannedRow]:
        """Return the best row of each recipe and mesh: the fastest that fits for sure, or else that may fit."""
        best: dict[tuple[str, int, int], PlannedRow] = {}
        for row in (*(row for row in self.rows if row.surely_fits), *(row for row in self.rows if row.may_fit)):
            best.setdefault(row.candidate.split, row)
        return sorted(best.values(), key=lambda row: -row.tokens_per_s)

    @property
    def recommended(self) -> PlannedRow | None:
        """Return the row to take: of those that fit for sure and are as good as the fastest, the simplest recipe.

        If some were simulated, it is one of them.
        """
        rows = [row for row in self.best if row.surely_fits and not row.timing.refused]
        rows = [row for row in rows if row.simulated is not None] or rows
        if not rows:
            return None
        fastest = max(row.tokens_per_s for row in rows)
        share = AS_GOOD_BY_DATA_SHEET if rows[0].timing.grade == DATA_SHEET else AS_GOOD
        as_good = [row for row in rows if row.tokens_per_s >= share * fastest]
        order = list(RECIPES)
        return min(as_good, key=lambda row: (order.index(row.candidate.run.recipe), -row.tokens_per_s))


def plan(
    config: RunConfig,
    cluster: Cluster,
    recipes: Sequence[str],
    resolve: Resolve,
    *,
    file: Path | None = None,
    machine: CalibratedMachine | None = None,
    host_memory: int | None = None,
) -> WorkPlan:
    """Plan a piece of work on a cluster.

    file, machine: the calibration, as cost_table has them. host_memory: bytes of a node, None where it is not known.
    """
    listed = enumerate_runs(config, cluster, recipes, resolve)
    fitting, nearest, n_listed = [], None, 0
    for group in listed.groups:
        n_listed += len(group)
        for row in _of_group(group, cluster, host_memory):
            if row.may_fit:
                fitting.append(row)
            elif nearest is None or row.margin > nearest.margin:
                nearest = row
    machines = cluster.machines(config.precision)

    def costs_of(operations: Iterable[Operation]) -> CostTable:
        return cost_table(operations, machines.device, machines.link, file, precision=config.precision, machine=machine)

    if cluster.is_cpu and not costs_of(()).measured:
        fix = f"gptscale calibrate --model {config.model} --nproc {cluster.ranks}"
        raise ConfigError("this machine was not measured yet, so no time is known", "in --here", fix)
    if cluster.is_cpu:
        timeable = [row for row in fitting if is_written(row.candidate.run, row.candidate.config)]
        chosen = [row for row in timeable if n_items(row.candidate) <= LONGEST]
        for recipe in {row.candidate.run.recipe for row in fitting} - {row.candidate.run.recipe for row in timeable}:
            listed.left_out[recipe] = "its step is not known on a processor"
    else:
        chosen = _worth_playing(fitting, machines, costs_of)
    written = [steps_of(row.candidate, machines) for row in chosen]
    costs = costs_of({operation for steps, _ in written for step in steps for operation in step.operations()})
    timed = [dataclasses.replace(row, timing=time_of(steps, costs)) for row, steps in zip(chosen, written, strict=True)]
    order = {name: place for place, name in enumerate(recipes)}
    # Equally fast rows stand in the order of the table of recipes, the simplest first.
    timed.sort(key=lambda row: (-round(row.tokens_per_s, 3), order[row.candidate.run.recipe], -row.margin))
    return WorkPlan(cluster, config, timed, None if timed else nearest, n_listed, listed.left_out, costs)


def _of_group(group: Iterable[Candidate], cluster: Cluster, host_memory: int | None) -> Iterator[PlannedRow]:
    """Yield the forms of a candidate, from the fastest on, until one fits for sure."""
    for candidate in group:
        row = PlannedRow(candidate, cluster, places_of(candidate))
        if host_memory is not None and row.places.host * cluster.per_node > host_memory:
            continue
        yield row
        if row.surely_fits:
            return


def _worth_playing(
    rows: Sequence[PlannedRow], machines: Machines, costs_of: Callable[[Iterable[Operation]], CostTable]
) -> list[PlannedRow]:
    """Return the rows that compute least, a few of each recipe and mesh."""
    works = [estimated_work(row.candidate, machines) for row in rows]
    costs = costs_of({operation for of_ranks in works for work in of_ranks for operation in work})
    estimates = [max(seconds_of(work, costs.seconds) for work in of_ranks) for of_ranks in works]
    chosen, of_split = [], Counter[tuple[str, int, int]]()
    for i in sorted(range(len(rows)), key=estimates.__getitem__):
        row, split = rows[i], rows[i].candidate.split
        if of_split[split] < PLAYED_OF_SPLIT and n_items(row.candidate) <= LONGEST:
            of_split[split] += 1
            chosen.append(row)
    return chosen[:PLAYED]


def time_of(written: Written, costs: CostTable) -> StepTime:
    """Return the seconds of a step, or why they are refused."""
    steps, more = written
    predictions = [costs.predict(step) for step in steps]
    last = predictions[-1]
    if costs.measured and last.far:
        return StepTime(refused=f"not calibrated: {last.far} is more than {FAR:.0f} times what was measured, or less")
    if costs.measured and last.spread > REFUSED_ABOVE:
        return StepTime(refused=f"not calibrated: {last.unknown} is known to {last.spread:.0%} only")
    seconds = last.seconds + more * (last.seconds - predictions[0].seconds)
    if not math.isfinite(seconds):
        return StepTime(refused="no time")
    return StepTime(seconds, last.spread, last.grade, played=last.timeline)


def with_limits(row: PlannedRow, costs: CostTable) -> PlannedRow:
    """Return the row with what bounds its step."""
    machines = row.cluster.machines(row.candidate.run.config.precision)
    if row.timing.refused:
        return row
    steps, more = steps_of(row.candidate, machines)
    each = [without_each(step, costs.seconds, machines, costs.contention) for step in steps]
    seconds_without = {cause: last + more * (last - each[0][cause]) for cause, last in each[-1].items()}
    cause = min(seconds_without, key=seconds_without.__getitem__)
    timing = dataclasses.replace(row.timing, bound_by=cause, gain=1 - seconds_without[cause] / row.timing.seconds)
    return dataclasses.replace(row, timing=timing)
