"""`gptscale plan`: which split of a model over which machines, how fast, and does it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.foresight.plan.options import PlanOptions
from gptscale.recipes import RECIPES
from gptscale.results.render import console, table

if TYPE_CHECKING:
    from gptscale.foresight.plan.files import PlanTable
    from gptscale.foresight.plan.planner import WorkPlan
    from gptscale.foresight.plan.rows import PlannedRow


def main(argv: Sequence[str]) -> int:
    """Plan, print the recommendation and the table, and write the files that the options name."""
    about = "Which split of a model, on which machines: what fits, how fast, and the command that starts it."
    options = parse(PlanOptions, argv, prog="gptscale plan", about=about)
    names = list(RECIPES) if options.recipes == "all" else parse_names(options.recipes, RECIPES, "recipe", "--recipes")
    # After the options are parsed, because they import torch.
    from gptscale.foresight.plan.decision import decide, find_limits
    from gptscale.foresight.plan.planning import cluster_of, plan_for, simulated_memory
    from gptscale.foresight.plan.report import merged, nothing_fits

    cluster = cluster_of(options)
    with console(stderr=True).status(f"planning for {cluster}"):
        plan = plan_for(options, cluster, names)
        if not any(row.may_fit for row in plan.rows):
            raise nothing_fits(plan)
        if options.simulate and not options.here:
            decide(plan, options.simulated, simulated_memory)
    best = plan.recommended
    if best is None:
        why = next((row.timing.refused for row in plan.rows if row.timing.refused), "none fits with a margin")
        measure = f"measure it first: gptscale calibrate {options.shape_words()} --nproc {cluster.ranks}"
        fix = measure if options.here else "use a smaller model or more devices"
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
        report.notes(plan),
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
    from gptscale.foresight.plan.picture import draw_row, draw_scaling, explained, scaling_speeds
    from gptscale.foresight.plan.planning import best_by_devices, simulated_memory

    number = options.explain or shown.recommended
    if number > len(shown.rows):
        raise ConfigError(f"the table has no row {number}", "in --explain", f"use 1 to {len(shown.rows)}")
    row = shown.rows[number - 1]
    if row.timing.refused:
        raise ConfigError(f"row {number} has no time ({row.timing.refused})", "in --explain", "choose another row")
    if options.explain:
        if options.simulate and not options.here and row.simulated is None:
            row = dataclasses.replace(row, simulated=simulated_memory(row))
        print("\n".join(explained(row)))
    if options.png or options.html:
        if options.scaling:
            work = f"{options.model}, global batch {plan.config.global_batch_size}, on {plan.cluster.device}"
            figure = draw_scaling(scaling_speeds(best_by_devices(options, plan)), work)
        else:
            figure = draw_row(row)
        write_figure(figure, shown, options.png, options.html)
    if options.md:
        write_table(options.md, shown)
    if options.save:
        print(f"plan     {options.save}, {write_plan(options.save, shown, plan, argv, options.calibration)[:16]}")
