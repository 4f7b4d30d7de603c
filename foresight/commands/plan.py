"""`gptscale plan`: which split of a model over which machines, how fast, and does it fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.foresight.plan.options import PlanOptions
from gptscale.recipes import RECIPES
from gptscale.results.record.files import export
from gptscale.results.render import console, markdown, picture_bytes, table

if TYPE_CHECKING:
    from gptscale.foresight.plan.planner import WorkPlan
    from gptscale.foresight.plan.planning import PlanTable


def main(argv: Sequence[str]) -> int:
    """Plan, print the recommendation and the table, and write the files that the options name."""
    about = "Which split of a model, on which machines: what fits, how fast, and the command that starts it."
    options = parse(PlanOptions, argv, prog="gptscale plan", about=about)
    names = list(RECIPES) if options.recipes == "all" else parse_names(options.recipes, RECIPES, "recipe", "--recipes")
    # After the options are parsed, because they import torch.
    from gptscale.foresight.plan.planning import cluster_of, plan_for
    from gptscale.foresight.plan.report import nothing_fits

    cluster = cluster_of(options)
    with console(stderr=True).status(f"planning for {cluster}") as status:
        plan = plan_for(options, cluster, names, lambda words: status.update(f"planning for {cluster}: {words}"))
    if not plan.rows:
        raise nothing_fits(plan)
    shown = _shown(options, plan)
    _print(shown)
    _leave(options, plan, shown, argv)
    return 0


def _shown(options: PlanOptions, plan: WorkPlan) -> PlanTable:
    from gptscale.foresight.plan import report
    from gptscale.foresight.plan.planning import PlanTable
    from gptscale.foresight.plan.rows import command_of

    best = plan.recommended
    assert best is not None
    batch = f"global batch {best.candidate.run.batch.global_batch_size} x {best.candidate.run.seq_len} tokens"
    return PlanTable(
        f"{options.model} on {plan.cluster}, {batch}, {plan.config.precision}",
        report.headline(plan, command_of(best)),
        plan.rows,
        report.cells(plan, plan.rows),
        report.notes(plan),
        1 + next(i for i, row in enumerate(plan.rows) if row is best),
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
    from gptscale.foresight.plan.picture import draw_row, draw_scaling, explained, scaling_speeds
    from gptscale.foresight.plan.planning import best_by_devices, write_plan
    from gptscale.foresight.plan.report import LEFT, page

    number = options.explain or shown.recommended
    if number > len(shown.rows):
        raise ConfigError(f"the table has no row {number}", "in --explain", f"use 1 to {len(shown.rows)}")
    row = shown.rows[number - 1]
    if options.explain:
        print("\n".join(explained(row)))
    if options.png or options.html:
        if options.scaling:
            work = f"{options.model}, global batch {plan.config.global_batch_size}, on {plan.cluster.device}"
            figure = draw_scaling(scaling_speeds(best_by_devices(options, plan)), work)
        else:
            figure = draw_row(row)
        if options.png:
            export(options.png, picture_bytes(figure, options.png.suffix[1:] or "png"))
        if options.html:
            text = page(shown.title, shown.lines, shown.cells, shown.notes, picture_bytes(figure))
            export(options.html, text.encode())
    if options.md:
        export(options.md, markdown(shown.cells, left=LEFT, notes=shown.notes).encode())
    if options.save:
        print(f"plan     {options.save}, {write_plan(options.save, shown, plan, argv)[:16]}")
