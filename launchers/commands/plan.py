"""`gptscale plan`: which split of a model over which machines, how fast, and does it fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, check_ranges, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.needs import OptionNeed
from gptscale.common.settings.run_config import RunConfig
from gptscale.recipes import RECIPES
from gptscale.results.render import console, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gptscale.foresight.calibrate.file import CalibratedMachine
    from gptscale.foresight.memory.report import RankMemory
    from gptscale.foresight.plan.files import PlanTable
    from gptscale.foresight.plan.planner import WorkPlan
    from gptscale.foresight.plan.question import Cluster
    from gptscale.foresight.plan.rows import PlannedRow

DEVICE = "h100-80"


@dataclass(frozen=True)
class PlanOptions:
    """The work, the machines, and what to write."""

    model: str = "1.6b"
    """Preset, as `gptscale run --model` has it."""
    n_layer: int | None = None
    """Overrides the preset's number of blocks."""
    n_embd: int | None = None
    """Overrides the preset's hidden size."""
    n_head: int | None = None
    """Overrides the preset's number of attention heads."""
    seq_len: int | None = None
    """Tokens per sequence. Default: the model's block_size."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all devices; default 16 for each."""
    precision: Literal["fp32", "bf16", "fp8"] | None = None
    """Default bf16, and fp32 with --here."""
    recipes: str = "all"
    """Names with commas between."""
    nodes: int = 1
    """Machines."""
    gpus_per_node: int = 8
    """Devices of one machine."""
    device: str = DEVICE
    """a100-80 | h100-80 | h200 | b200 | 24gb."""
    link: str | None = None
    """Names with commas between: nvlink, nvlink3 to 5, pcie4, pcie5 in a node; ib-400, roce-400, ethernet-10 and others between
    nodes, in Gb/s of all ports of a node. Default: what the device usually has."""
    host_memory: float | None = None
    """GiB of each machine's own memory, for recipes that keep state there; default: not checked."""
    here: bool = False
    """Plan for this machine's processor, by what `gptscale calibrate` measured on it."""
    nproc: int | None = None
    """With --here: processes; default one for each core, at most 8."""
    calibration: Path | None = None
    """File of `gptscale calibrate`; default where that writes it."""
    simulate: bool = True
    """Let a simulation of the allocator decide for the best few whether they fit; --no-simulate leaves it at formulas."""
    simulated: int = 3
    """Rows to simulate until so many fit."""
    rows: int = 12
    """Rows of the table."""
    explain: int | None = None
    """Say what a row's streams do when, and draw it with --png."""
    scaling: bool = False
    """Plan for fewer devices too, and draw tokens/s against their number with --png."""
    png: Path | None = None
    """The picture of --explain or --scaling, by default of the recommended row."""
    md: Path | None = None
    """The table as Markdown."""
    html: Path | None = None
    """The table and the picture as one page."""
    save: Path | None = None
    """The plan with a hash, for `gptscale run --plan`."""
    check: Path | None = None
    """A table of runs that others measured: predict each half of it from the other half, and nothing else."""
    calibrate_on: tuple[Path, ...] = ()
    """With --check: predict all of its rows from these tables instead."""
    csv: Path | None = None
    """With --check: the rows with their predictions, as CSV."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (
        OptionNeed("calibrate_on,csv", lambda o: o.check, "there is no table of measured runs", "add --check FILE"),
        OptionNeed("nproc", lambda o: o.here, "the devices are --nodes times --gpus-per-node", "add --here"),
        OptionNeed(
            "nodes,gpus_per_node,device,link,host_memory,simulate",
            lambda o: not o.here,
            "--here is this machine",
        ),
        OptionNeed("scaling", lambda o: o.png or o.html, "the picture has no file", "add --png FILE"),
        OptionNeed(
            "model,n_layer,n_embd,n_head,seq_len,global_batch_size,precision,recipes,nodes,gpus_per_node,device,link,here,nproc,"
            "host_memory,calibration,simulate,no_simulate,simulated,rows,explain,scaling,png,md,html,save",
            lambda o: not o.check,
            "--check predicts the rows of its table, and nothing else",
        ),
        OptionNeed("simulated", lambda o: o.simulate and not o.here, "nothing is simulated", ""),
    )

    def __post_init__(self) -> None:
        for name in ("csv", "png", "md", "html", "save"):
            check_output_file(getattr(self, name), f"--{name}")
        whole = {
            "nodes": (1, 4096),
            "gpus_per_node": (1, 64),
            "nproc": (1, 64),
            "rows": (1, 1000),
            "explain": (1, 1000),
        }
        check_ranges(self, {**whole, "simulated": (1, 20), "host_memory": (1, 1e6)})

    def work(self, ranks: int) -> RunConfig:
        """Return the options of a run that do not split it."""
        return RunConfig(
            model=self.model,
            n_layer=self.n_layer,
            n_embd=self.n_embd,
            n_head=self.n_head,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size or 16 * ranks,
            precision=self.precision or ("fp32" if self.here else "bf16"),
            device="cpu" if self.here else "cuda",
        )


def main(argv: Sequence[str]) -> int:
    """Plan, print the recommendation and the table, and write the files that the options name."""
    about = "Which split of a model, on which machines: what fits, how fast, and the command that starts it."
    options = parse(PlanOptions, argv, prog="gptscale plan", about=about)
    if options.check is not None:
        return _check(options.check, options)
    names = list(RECIPES) if options.recipes == "all" else parse_names(options.recipes, RECIPES, "recipe", "--recipes")
    from gptscale.foresight.plan.decision import decide, find_limits
    from gptscale.foresight.plan.report import merged, nothing_fits

    cluster = _cluster(options)
    with console(stderr=True).status(f"planning for {cluster}"):
        plan = _plan(options, cluster, names)
        if not any(row.may_fit for row in plan.rows):
            raise nothing_fits(plan)
        if options.simulate and not options.here:
            decide(plan, options.simulated, _simulated)
    best = plan.recommended
    if best is None:
        why = next((row.timing.refused for row in plan.rows if row.timing.refused), "none fits with a margin")
        fix = (
            "measure this machine first: gptscale calibrate" if options.here else "use a smaller model or more devices"
        )
        raise ConfigError(f"no row can be recommended ({why})", "in plan", fix)
    rows, also = merged(plan.best)
    rows, also = rows[: options.rows], also[: options.rows]
    find_limits(plan, rows)
    shown = _shown(options, plan, rows, also)
    _print(shown)
    _leave(options, plan, shown, argv)
    return 0


def _shown(options: PlanOptions, plan: WorkPlan, rows: list[PlannedRow], also: Sequence[Sequence[str]]) -> PlanTable:
    from gptscale.foresight.plan import report
    from gptscale.foresight.plan.command_lines import command_of
    from gptscale.foresight.plan.files import PlanTable

    best = plan.recommended
    assert best is not None
    batch = f"global batch {best.candidate.run.batch.global_batch_size} x {best.candidate.run.seq_len} tokens"
    recommended = next((i for i, row in enumerate(rows, start=1) if row.candidate.split == best.candidate.split), 1)
    return PlanTable(
        f"{options.model} on {plan.cluster}, {batch}, {plan.config.precision}",
        report.headline(plan, command_of(best)),
        rows,
        report.cells(rows, also, recommended),
        report.notes(plan, options.simulate and not options.here),
        recommended,
    )


def _print(shown: PlanTable) -> None:
    from rich.text import Text

    from gptscale.foresight.plan.report import LEFT

    print("\n".join([*shown.lines, ""]))
    printed = table(list(shown.cells[0]), left=LEFT, title=shown.title, padding=(0, 1, 0, 0))
    for row in shown.cells:
        printed.add_row(*(Text(text) for text in row.values()))
    console(log_columns=200, highlight=False).print(printed)
    for note in shown.notes:
        print(f"note: {note}")


def _leave(options: PlanOptions, plan: WorkPlan, shown: PlanTable, argv: Sequence[str]) -> None:
    """Explain a row and write the files that the options name."""
    from gptscale.foresight.plan.files import write_figure, write_plan, write_table
    from gptscale.foresight.plan.picture import draw_row, explained

    number = options.explain or shown.recommended
    if number > len(shown.rows):
        raise ConfigError(f"the table has no row {number}", "in --explain", f"use 1 to {len(shown.rows)}")
    row = shown.rows[number - 1]
    if row.timing.refused:
        raise ConfigError(f"row {number} has no time ({row.timing.refused})", "in --explain", "choose another row")
    if options.explain:
        print("\n".join(explained(row)))
    if options.png or options.html:
        figure = _scaling(options, plan) if options.scaling else draw_row(row)
        write_figure(figure, shown, options.png, options.html)
    if options.md:
        write_table(options.md, shown)
    if options.save:
        print(f"plan     {options.save}, {write_plan(options.save, shown, plan, argv, options.calibration)[:16]}")


def _cluster(options: PlanOptions) -> Cluster:
    from gptscale.foresight.plan.question import cpu_cluster, gpu_cluster

    if not options.here:
        return gpu_cluster(options.device, options.nodes, options.gpus_per_node, options.link)
    import psutil

    return cpu_cluster(options.nproc or min(8, len(os.sched_getaffinity(0))), psutil.virtual_memory().available)


def _plan(options: PlanOptions, cluster: Cluster, names: Sequence[str]) -> WorkPlan:
    import torch

    from gptscale.common.process.world import World
    from gptscale.common.recipe_config import RecipeConfig
    from gptscale.common.settings.run import Run
    from gptscale.foresight.plan.planner import plan
    from gptscale.launchers.run.preflight import resolve
    from gptscale.recipes import unsupported

    world = World(0, 0, cluster.ranks, torch.device("cpu" if cluster.is_cpu else "cuda"), 600.0)

    def resolved(recipe: str, config: RunConfig, own: RecipeConfig) -> Run:
        run = resolve(recipe, config, own, world)
        unsupported.check(recipe, run.config, own)
        if own.offload != "nvme":  # which looks at this machine's disk
            own.check(run)
        return run

    work = options.work(cluster.ranks)
    memory = None if options.host_memory is None else int(options.host_memory * 2**30)
    return plan(work, cluster, names, resolved, file=options.calibration, host_memory=memory, machine=_machine(cluster))


def _machine(cluster: Cluster) -> CalibratedMachine | None:
    """Return what a calibration of this machine is filed under, None for other machines."""
    if not cluster.is_cpu:
        return None
    import torch

    from gptscale.common.measure.devices import device_name
    from gptscale.foresight.calibrate.file import CalibratedMachine

    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // cluster.ranks))
    version = torch.__version__.partition("+")[0]
    return CalibratedMachine(device_name(torch.device("cpu")), version, threads, cluster.ranks)


def _simulated(row: PlannedRow) -> RankMemory:
    """Return the memory of a row's rank that needs most: the first, and of stages also the last."""
    from gptscale.launchers.run.simulation import rank_memory, simulate

    run, cluster = row.candidate.run, row.cluster
    memories = []
    for rank in dict.fromkeys((0, cluster.ranks - 1 if run.pp_size > 1 else 0)):
        found = simulate(
            run.recipe,
            dataclasses.replace(run.config, data="synthetic"),
            row.candidate.config,
            device=cluster.device,
            rank=rank,
            world_size=cluster.ranks,
            ranks_per_node=cluster.per_node,
        )
        memories.append(rank_memory(found, rank))
    return max(memories, key=lambda memory: (memory.fits is False, memory.needed))


def _check(file: Path, options: PlanOptions) -> int:
    """Predict the rows of a table, print the summary, and write the rows."""
    from gptscale.foresight.tables.check import check
    from gptscale.foresight.tables.report import summary, write_rows
    from gptscale.foresight.tables.table import read_table

    measured = read_table(file)
    others = [read_table(path) for path in options.calibrate_on]
    rows = check(measured, others)
    for line in summary(measured, others, rows):
        print(line)
    if options.csv:
        write_rows(options.csv, measured, rows)
        print(f"{len(rows)} rows in {options.csv}")
    return 0


def _scaling(options: PlanOptions, plan: WorkPlan) -> Figure:
    """Plan for fewer devices too, with the same global batch, and draw the best splits."""
    from gptscale.foresight.plan.picture import draw_scaling, scaling_speeds
    from gptscale.foresight.plan.report import merged

    cluster, plans = plan.cluster, {plan.cluster.ranks: merged(plan.best)[0]}
    names = list(dict.fromkeys(row.candidate.run.recipe for row in plans[cluster.ranks]))
    ranks = cluster.ranks // 2
    while ranks:
        nodes, per_node = (ranks // cluster.per_node, cluster.per_node) if ranks >= cluster.per_node else (1, ranks)
        fewer = dataclasses.replace(cluster, nodes=nodes, per_node=per_node)
        same = dataclasses.replace(options, global_batch_size=plan.config.global_batch_size)
        plans[ranks] = merged(_plan(same, fewer, names).best)[0]
        ranks //= 2
    work = f"{options.model}, global batch {plan.config.global_batch_size}, on {cluster.device}"
    return draw_scaling(scaling_speeds({n: rows for n, rows in plans.items() if rows}), work)
