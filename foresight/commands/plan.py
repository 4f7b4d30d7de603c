"""`gptscale plan`: which split of a model over which machines, how fast, and does it fit."""

from __future__ import annotations

from collections.abc import Sequence

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import parse_names
from gptscale.common.settings.command_line import parse
from gptscale.foresight.plan.options import PlanOptions
from gptscale.recipes import RECIPES
from gptscale.results.record.files import export
from gptscale.results.render import console, markdown, picture_bytes, table


def main(argv: Sequence[str]) -> int:
    """Plan, print the recommendation and the table, explain a row, and write the files that the options name."""
    about = "Which split of a model, on which machines: what fits, how fast, and the command that starts it."
    options = parse(PlanOptions, argv, prog="gptscale plan", about=about)
    names = list(RECIPES) if options.recipes == "all" else parse_names(options.recipes, RECIPES, "recipe", "--recipes")
    # After the options are parsed, because they import torch.
    from rich.text import Text

    from gptscale.foresight.plan import picture, report
    from gptscale.foresight.plan.planning import best_by_devices, cluster_of, plan_for, write_plan

    cluster = cluster_of(options)
    with console(stderr=True).status(f"planning for {cluster}") as status:
        plan = plan_for(options, cluster, names, lambda words: status.update(f"planning for {cluster}: {words}"))
    if not plan.rows:
        raise report.nothing_fits(plan)
    title, lines, cells, notes = report.title(plan), report.headline(plan), report.cells(plan), report.notes(plan)
    print("\n".join([*lines, ""]))
    texts = (map(Text, row.values()) for row in cells)
    printed = table(list(cells[0]), texts, left=report.LEFT, title=title, padding=(0, 1, 0, 0))
    console(log_columns=200, highlight=False).print(printed)
    for note in notes:
        print(f"note: {note}")
    number = options.explain or plan.recommended_number
    if number > len(plan.rows):
        raise ConfigError(f"the table has no row {number}", "in --explain", f"use 1 to {len(plan.rows)}")
    row = plan.rows[number - 1]
    if options.explain:
        print("\n".join(picture.explained(row)))
    if options.png or options.html:
        if options.scaling:
            work = f"{options.model}, global batch {plan.config.global_batch_size}, on {plan.cluster.device}"
            figure = picture.draw_scaling(picture.scaling_speeds(best_by_devices(options, plan)), work)
        else:
            figure = picture.draw_row(row)
        if options.png:
            export(options.png, picture_bytes(figure, options.png.suffix[1:] or "png"))
        if options.html:
            export(options.html, report.page(title, lines, cells, notes, picture_bytes(figure)).encode())
    if options.md:
        export(options.md, markdown(cells, left=report.LEFT, notes=notes).encode())
    if options.save:
        print(f"plan     {options.save}, {write_plan(options.save, plan, argv)[:16]}")
    return 0
