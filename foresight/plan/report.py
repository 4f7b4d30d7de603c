"""A plan in words: the recommendation, the table, the notes, and all of it as a page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from gptscale.common.errors import ConfigError
from gptscale.foresight.plan.planner import WorkPlan
from gptscale.foresight.plan.question import GIB
from gptscale.foresight.plan.rows import PlannedRow
from gptscale.foresight.time.data_sheets import sheet_of, sources_of

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gptscale: plan</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem }
 table { border-collapse: collapse } th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: left }
 pre { background: #f5f5f5; padding: .6rem; overflow-x: auto } img { max-width: 100% }
</style></head><body>
<h1>{{ title }}</h1><pre>{% for line in lines %}{{ line }}
{% endfor %}</pre>
<table><thead><tr>{% for name in rows[0] %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row.values() %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
<img alt="the picture of the plan" src="data:image/png;base64,{{ png }}">
</body></html>
"""
LEFT = ("", "recipe and split", "micro-batches", "memory, GiB", "grade", "bound by")


def cells(rows: Sequence[PlannedRow], also: Sequence[Sequence[str]], recommended: int) -> list[dict[str, str]]:
    """Return a row of cells for each planned row, with a star at the recommended one.

    also: recipes that take the same time as each.
    """
    numbers = [f"{i}{' *' if i == recommended else ''}" for i in range(1, len(rows) + 1)]
    return [_cells(number, row, others) for number, row, others in zip(numbers, rows, also, strict=True)]


def _cells(number: str, row: PlannedRow, also: Sequence[str]) -> dict[str, str]:
    timing = row.timing
    low, high = timing.interval
    has_time = not timing.refused
    how = "" if row.simulated is not None else "~"
    return {
        "": number,
        "recipe and split": row.name + (f" (also {', '.join(also)})" if also else ""),
        "micro-batches": row.detail,
        "tokens/s": f"{row.tokens_per_s:,.0f}" if has_time else "-",
        "step ms": f"{1e3 * timing.seconds:,.0f} ({1e3 * low:,.0f}-{1e3 * high:,.0f})" if has_time else "-",
        "MFU": "-" if row.mfu is None else f"{row.mfu:.0%}",
        "margin GiB": f"{how}{row.margin / GIB:,.1f}" if row.may_fit else f"lacks {-row.margin / GIB:,.1f}",
        "memory, GiB": row.memory_words(),
        "bound by": f"{timing.bound_by} ({timing.gain:.0%})" if timing.bound_by else timing.refused,
        "grade": timing.grade or "no time",
    }


def merged(rows: Sequence[PlannedRow]) -> tuple[list[PlannedRow], list[list[str]]]:
    """Return rows without those of other recipes that take the same time in the same way, and the names of these recipes."""
    shown: list[PlannedRow] = []
    also: list[list[str]] = []
    places: dict[tuple[object, ...], int] = {}
    for row in rows:
        run = row.candidate.run
        key = (f"{row.timing.seconds:.9g}", run.tp_size, run.pp_size, row.detail, bool(row.timing.refused))
        if key in places and shown[places[key]].candidate.run.recipe != run.recipe:
            also[places[key]].append(run.recipe)
            continue
        places[key] = len(shown)
        shown.append(row)
        also.append([])
    return shown, also


def headline(plan: WorkPlan, command: str) -> list[str]:
    """Return the recommendation, and why it is not the next two."""
    best = plan.recommended
    assert best is not None
    low, high = best.timing.interval
    lines = [
        f"recommended  {best.name}, micro-batches {best.detail}: {best.tokens_per_s:,.0f} tokens/s, "
        f"step {best.timing.seconds:.3g} s ({low:.3g} to {high:.3g}, {best.timing.grade})",
        f"  {command}",
    ]
    others = [
        row for row in merged(plan.best)[0] if row.candidate.split != best.candidate.split and not row.timing.refused
    ]
    return lines + [f"  {_why_not(best, row)}" for row in others[:2]]


def _why_not(best: PlannedRow, other: PlannedRow) -> str:
    """Return a sentence on why a row is not the recommended one."""
    slower = other.timing.seconds / best.timing.seconds - 1
    limit = f", bound by {other.timing.bound_by}" if other.timing.bound_by not in ("", "compute") else ""
    margin = f"its margin is {other.margin / GIB:,.1f} GiB, not {best.margin / GIB:,.1f}"
    if slower < -0.005:
        return (
            f"Not {other.name}: it would be {-slower:.1%} faster, within what such a prediction can tell, and {margin}."
        )
    if slower < 0.005:
        return f"Not {other.name}: it is as fast{limit}, {margin}, and the recommended recipe is the simpler one."
    return f"Not {other.name}: its step is {slower:.1%} longer{limit}; {margin}."


def notes(plan: WorkPlan) -> list[str]:
    """Return what a reader should know about the table."""
    cluster = plan.cluster
    lines = [
        f"{plan.listed:,} valid runs; of those that fit, {len(plan.rows)} were played, and the best of each split is shown"
    ]
    if cluster.assumed:
        lines.append(f"assumed, because --link does not say otherwise: {cluster.assumed}")
    if any(row.simulated is None for row in merged(plan.best)[0]):
        lines.append(
            "~ memory is a bound, not simulated: what a rank holds, gathers and keeps, without all else and what torch reserves"
        )
    if any(row.timing.grade.startswith("data sheet") for row in plan.rows):
        lines.append("data sheet: no such device was measured, the times order splits and promise nothing")
        lines += sources_of(sheet_of(cluster.device, plan.config.precision), cluster.link)
    lines += [f"left out: {name}: {why}" for name, why in plan.left_out.items()]
    return lines


def page(title: str, lines: Sequence[str], rows: Sequence[Mapping[str, str]], notes: Sequence[str], png: bytes) -> str:
    """Return the plan as HTML, in which all text is escaped and nothing is fetched from anywhere."""
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return template.render(title=title, lines=lines, rows=rows, notes=notes, png=base64.b64encode(png).decode())


def nothing_fits(plan: WorkPlan) -> ConfigError:
    """Return the error for work that no strategy fits, with the row that comes nearest."""
    row = plan.nearest
    if row is None:
        why = "; ".join(f"{name}: {why}" for name, why in list(plan.left_out.items())[:2])
        return ConfigError(
            f"no recipe accepts this work on {plan.cluster} ({why})", "in plan", "change what is named there"
        )
    return ConfigError(
        f"nothing fits on {plan.cluster}: {row.name}, micro-batches {row.detail}, comes nearest and lacks "
        f"{-row.margin / GIB:.1f} GiB of {row.cluster.memory / GIB:.1f} a device ({row.memory_words()})",
        "in plan",
        "use more devices, devices with more memory, a smaller model, or a shorter --seq-len",
    )
