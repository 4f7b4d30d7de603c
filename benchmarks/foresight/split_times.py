"""Does the simulation put splits in the order that others measured? Tensor, data and pipeline ranks in all mixtures.

python -m benchmarks.foresight.split_times --table FILE [--every 7] [--least 4] [--most 12] [--launch-us 37] [--csv FILE]

FILE is a table that split_tables.py reads: one of vTrain's of Megatron-DeepSpeed on A100 (VIA-Research/vTrain,
data/ground_truth_single.csv or _multi.csv), or nanotron's on H100 (the Ultra-Scale Playbook's benchmarks). A group is a model, a
number of GPUs and a global batch: its rows differ in the split and the micro-batch alone. Each row is simulated as the recipe
that splits so. Of each group the fastest by simulation is the one that would be recommended; beside it stands the fastest that
was measured. All is told twice: with a host that is always ahead, and with one that asks for a kernel in --launch-us, as one row
of vTrain's tells that is bound by its host. A third time, with the first host, is priced with the links that the table's own
test of collectives found, where there is one. Where the table tells memory, that is compared, and whether what crashed fits.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.foresight.programs import table_shapes
from benchmarks.foresight.split_tables import PER_NODE, READERS, MeasuredSplit
from benchmarks.measurement import collect, print_written, tell
from gptscale.common.errors import DataError, GptscaleError
from gptscale.common.process.world import World
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import RunConfig
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.mock_cuda.devices import device_named
from gptscale.foresight.plan.question import Cluster, gpu_cluster
from gptscale.foresight.plan.rows import Tried
from gptscale.foresight.plan.trials import RECORDED, tried
from gptscale.foresight.price.cost import OUTER_LINKS, Costs
from gptscale.foresight.price.record import TIMED
from gptscale.foresight.price.step_time import SPREAD
from gptscale.foresight.simulate.interpreters import prepare_mock, torch_folder_of
from gptscale.foresight.simulate.program import ProgramTask, Simulation
from gptscale.foresight.simulate.simulation import LIMIT_S, STEPS, kept_simulation
from gptscale.launchers.cli import start
from gptscale.launchers.run.options import option_words
from gptscale.launchers.run.preflight import resolve
from gptscale.recipes import get

if TYPE_CHECKING:
    import pandas as pd

FILE_BYTES_MAX = 2**26
PROGRAM = Path(table_shapes.__file__)
# A split that is slower than the best measured one by less is as good.
AS_GOOD = 1.05
# The time of what does not fit is asked too. Fit is told by what it needs.
MEMORY = 200 * 2**30


@dataclass(frozen=True)
class SplitTimeOptions:
    """Which groups of the table to simulate."""

    table: Path
    """A table of vTrain, or nanotron's."""
    every: int = 10
    """Every so manieth group."""
    begin: int = 0
    """The first of these groups."""
    least: int = 4
    """Groups with fewer rows that ran are left out."""
    most: int = 10**6
    """Rows of a group that ran, spread evenly, and half as many that crashed."""
    stages: int = 10**6
    """Rows with more stages are left out."""
    launch_us: float = 37.0
    """Microseconds in which a host asks for a kernel."""
    csv: Path | None = None
    """A row for each that was compared."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Simulate groups of the table, print what would be recommended in each, and return 1 if none was compared."""
    about = "The order of splits by simulation beside the order that others measured."
    options = parse(SplitTimeOptions, argv, prog="python -m benchmarks.foresight.split_times", about=about)

    def refuse(reason: str) -> DataError:
        return DataError(f"{options.table} is no table that is known ({reason})", "in --table", "give one of its CSVs")

    table_shapes.know_shapes()
    prepare_mock()
    chosen = chosen_rows(options, refuse)
    told = (found for number, row in chosen if (found := compared(number, row, options.launch_us)))
    frame = collect(told, options.csv)
    print_written(options.csv)
    if frame.empty:
        return 1
    ran = frame[frame.measured_s.notna()]
    for name in ("host_ahead_s", "simulated_s", "own_links_s"):
        report(ran, name)
    if ran.memory_gb.notna().any():
        report_memory(frame)
    return 0


def chosen_rows(options: SplitTimeOptions, refuse: Callable[[str], DataError]) -> list[tuple[int, MeasuredSplit]]:
    """Return the rows to simulate, each with the number of its group."""
    table = read_rows(options.table, FILE_BYTES_MAX, refuse)
    reader = next((reader for column, reader in READERS.items() if table and column in table[0]), None)
    if reader is None:
        raise refuse("it has none of the columns " + ", ".join(READERS))
    groups: dict[tuple[Any, ...], list[MeasuredSplit]] = {}
    for row in map(reader, table):
        if row is not None and row.split["pp"] <= options.stages:
            groups.setdefault(row.group, []).append(row)
    large = [groups[key] for key in sorted(groups)]
    large = [rows for rows in large if sum(row.seconds is not None for row in rows) >= options.least]
    chosen = []
    for number, rows in list(enumerate(large))[options.begin :: options.every]:
        for most, kind in ((options.most, True), (options.most // 2, False)):
            alike = [row for row in rows if (row.seconds is not None) == kind]
            chosen += [(number, row) for row in alike[:: -(-len(alike) // max(1, most)) or 1]]
    return chosen


def compared(number: int, row: MeasuredSplit, launch_us: float) -> dict[str, Any] | None:
    """Return a row's split with what was measured and simulated, or None after saying why it cannot be simulated."""
    try:
        timing, with_own_links = trial(row, launch_us)
    except GptscaleError as error:
        tell(f"{row.group} {row.name}: left out: {error}")
        return None
    memory = timing.memory
    assert memory is not None
    outside = memory.needed - memory.reserved
    ahead, own_links = (time.low * SPREAD or None for time in (timing, with_own_links))
    fits = not memory.out_of_memory and memory.allocated + outside <= device_named(row.machine.device).memory
    simulated = timing.seconds if ahead else None
    times = {"host_ahead_s": ahead, "simulated_s": simulated, "own_links_s": own_links}
    told = "crashed" if row.seconds is None else f"measured {row.seconds:.3f} s"
    for name, seconds in times.items():
        if row.seconds is not None and seconds is not None:
            told += f", {name} {seconds / row.seconds - 1:+.1%}"
    told += f", {timing.bound_by}, {row.memory_gb} GB, allocated {memory.allocated / 1e9:.1f} GB, fits {fits}"
    tell(f"{row.group} {row.recipe} {row.name}: {told}")
    found = {"measured_s": row.seconds, **times, "bound": timing.bound_by, "memory_gb": row.memory_gb}
    found |= {"allocated_gb": memory.allocated / 1e9, "reserved_gb": memory.reserved / 1e9, "fits": fits}
    of_row = {"group": number, **{f"group {i}": part for i, part in enumerate(row.group)}, "recipe": row.recipe}
    return {**of_row, **row.split, "zero": row.zero, "micro batch": row.options["micro_batch_size"], **found}


@dataclass(frozen=True)
class TestedLinks(Cluster):
    """A cluster whose links between nodes were tested. reached: the bytes a second of a node."""

    reached: float = 0.0

    def costs(self, precision: str, torch: str = "") -> Costs:
        """Return what work costs there."""
        known = super().costs(precision, torch)
        return dataclasses.replace(
            known, reached=dataclasses.replace(known.reached, outside=self.reached / OUTER_LINKS[self.links[1]])
        )


def trial(row: MeasuredSplit, launch_us: float) -> tuple[Tried, Tried]:
    """Return what a simulation of the recipe with a row's split tells, with links of the data sheet and with tested ones.

    Of a row that crashed, only the outer stages run.
    """
    pp, n, recipe = row.split["pp"], row.gpus, row.recipe
    kind = getattr(get(recipe).load(), get(recipe).config)
    own = kind(data_parallel="ddp") if recipe == "hybrid_3d" else kind(**get(recipe).preset)
    sizes: dict[str, Any] = {f"{axis}_size": row.split[axis] for axis in get(recipe).axes if axis in ("tp", "pp")}
    config = RunConfig(**sizes, **row.options, precision="bf16", device="cuda", data="synthetic")
    run = resolve(recipe, config, own, World(0, 0, n, torch.device("cuda"), 600.0))
    own.check(run)
    micro_batches = run.batch.grad_accum_steps
    # Once all stages are filled, each further micro-batch takes as long as the last ones.
    written = min(micro_batches, RECORDED if pp == 1 else 2 * pp)
    few = dataclasses.replace(config, global_batch_size=None, grad_accum_steps=written, tensorboard=False)
    ranks = run.mesh.ranks("pp")
    each = []
    for rank in ranks if row.seconds is not None else sorted({ranks[0], ranks[-1]}):
        words = ["-W", "ignore", "-P", str(PROGRAM), recipe, *option_words(recipe, few, own)]
        device = dataclasses.replace(device_named(row.machine.device), memory=MEMORY)
        task = ProgramTask([sys.executable, *words], n, str(rank), device, min(n, PER_NODE), STEPS, LIMIT_S, ends=False)
        task = dataclasses.replace(task, torch_folder=torch_folder_of(""))
        each.append(priced_as_of(row, kept_simulation(task, PROGRAM.read_text()), launch_us))
    if row.seconds is None:
        memory = max((of_rank.memory() for of_rank in each), key=lambda memory: (not memory.fits, memory.needed))
        untimed = Tried(float("inf"), 0.0, float("inf"), "not timed", memory=memory)
        return untimed, untimed
    nodes = max(1, n // PER_NODE)
    cluster = gpu_cluster(row.machine.device, nodes, min(n, PER_NODE), row.machine.links)
    reached = row.machine.reached.get(nodes)
    tested = TestedLinks(**vars(cluster), reached=reached) if reached else cluster
    first, second = (tried(each, where, "bf16", micro_batches, written) for where in (cluster, tested))
    return first, second


def priced_as_of(row: MeasuredSplit, simulation: Simulation, launch_us: float) -> Simulation:
    """Return a simulation with the torch of the table's day, and with a host that asks for a kernel in so many microseconds."""
    launches = sum(work.kind in TIMED for work in simulation.recorded or ())
    facts = {**simulation.facts, "host_s": 1e-6 * launch_us * launches}
    facts["torch"] = row.machine.torch or facts["torch"]
    return dataclasses.replace(simulation, facts=facts)


def report_memory(frame: pd.DataFrame) -> None:
    """Print how far the memory is off, and whether what ran fits and what crashed does not."""
    ran, crashed = frame[frame.measured_s.notna()], frame[frame.measured_s.isna()]
    print(
        f"fit: {ran.fits.sum()} of {len(ran)} rows that ran fit, {(~crashed.fits).sum()} of {len(crashed)} that crashed do not"
    )
    # None of our recipes cuts the optimizer's state alone beside tensor ranks or stages.
    for name, rows in {
        "all": ran,
        "with the same state": ran[(ran.zero == 0) | (ran.dp == 1) | (ran.recipe == "zero1")],
    }.items():
        for column in ("allocated_gb", "reserved_gb"):
            off = rows[column] / rows.memory_gb - 1
            if len(off):
                print(
                    f"  {column}, {name}: {len(off)} rows: median {off.abs().median():.1%} off, worst {off.abs().max():.1%}, "
                    f"mean {off.mean():+.1%}"
                )


def report(frame: pd.DataFrame, name: str) -> None:
    """Print how far the times of a column are off, and how good the splits are that would be recommended by them."""
    frame = frame[frame[name].notna()]
    good, behind, pairs, right = 0, [], 0, 0
    kept = [rows for _, rows in frame.groupby("group") if len(rows) > 1]
    for rows in kept:
        behind.append(rows.sort_values(name).measured_s.iloc[0] / rows.measured_s.min())
        good += behind[-1] <= AS_GOOD
        ordered, measured = rows.sort_values("measured_s")[name].tolist(), sorted(rows.measured_s)
        for i, first in enumerate(ordered):
            # Rows within the tolerance of each other have no order.
            far = [second for j, second in enumerate(ordered) if measured[j] > AS_GOOD * measured[i]]
            pairs, right = pairs + len(far), right + sum(first < second for second in far)
    off = frame[name] / frame.measured_s - 1
    print(
        f"{name}: {len(frame)} rows: median {off.abs().median():.1%} off, worst {off.abs().max():.1%}, mean {off.mean():+.1%}"
    )
    if kept:
        print(
            f"  {len(kept)} groups: the recommended split within {AS_GOOD - 1:.0%} of the best measured one in {good}, "
            f"worst {max(behind) - 1:.1%} behind it; {right} of {pairs} pairs that differ by more in the right order"
        )


if __name__ == "__main__":
    sys.exit(start(main))
