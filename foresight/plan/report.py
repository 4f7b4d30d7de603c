"""A plan in words: the recommendation, the table, the notes, and all of it as a page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.measure.gpus import GIB
from gptscale.foresight.plan.planner import WorkPlan
from gptscale.foresight.plan.rows import PlannedRow, command_of
from gptscale.foresight.plan.trials import CONTENDED
from gptscale.foresight.price.cost import Costs, sources_of

LEFT = ("", "recipe and split", "micro-batches", "memory, GiB", "grade", "bound by")


def title(plan: WorkPlan) -> str:
    """Return the work and the machines in one line."""
    run = plan.recommended.run
    work = f"global batch {run.batch.global_batch_size} x {run.seq_len} tokens, {plan.config.precision}"
    return f"{plan.config.model} on {plan.cluster}, {work}"


def cells(plan: WorkPlan) -> list[dict[str, str]]:
    """Return a row of cells for each planned row, with a star at the recommended one."""
    found = []
    for i, row in enumerate(plan.rows, start=1):
        timing, also = row.timing, plan.also.get(row.split, ())
        found.append(
            {
                "": f"{i}{' *' * (row is plan.recommended)}",
                "recipe and split": row.name + (f" (also {', '.join(also)})" if also else ""),
                "micro-batches": row.detail,
                "tokens/s": f"{row.tokens_per_s:,.0f}",
                "step ms": f"{1e3 * timing.seconds:,.0f} ({1e3 * timing.low:,.0f}-{1e3 * timing.high:,.0f})",
                "MFU": "-" if timing.mfu is None else f"{timing.mfu:.0%}",
                "margin GiB": f"{'~' * (row.simulated is None)}{row.margin / GIB:,.1f}",
                "memory, GiB": row.memory_words(),
                "bound by": timing.bound_by,
                "grade": timing.grade,
            }
        )
    return found


def headline(plan: WorkPlan) -> list[str]:
    """Return the recommendation with its command, and why it is not the next two."""
    best = plan.recommended
    timing = best.timing
    lines = [
        f"recommended  {best.name}, micro-batches {best.detail}: {best.tokens_per_s:,.0f} tokens/s, "
        f"step {timing.seconds:.3g} s ({timing.low:.3g} to {timing.high:.3g}, {timing.grade})",
        f"  {command_of(best)}",
    ]
    return lines + [f"  {_why_not(best, row)}" for row in [row for row in plan.rows if row is not best][:2]]


def _why_not(best: PlannedRow, other: PlannedRow) -> str:
    """Return a sentence on why a row is not the recommended one."""
    slower = other.timing.seconds / best.timing.seconds - 1
    limit = f", bound by {other.timing.bound_by}" if other.timing.bound_by else ""
    margin = f"its margin is {other.margin / GIB:,.1f} GiB, not {best.margin / GIB:,.1f}"
    if slower < -0.005:
        return f"Not {other.name}: it would be {-slower:.1%} faster, within what a prediction can tell, and {margin}."
    if slower < 0.005:
        return f"Not {other.name}: it is as fast{limit}, {margin}, and the recommended recipe is the simpler one."
    return f"Not {other.name}: its step is {slower:.1%} longer{limit}; {margin}."


def notes(plan: WorkPlan) -> list[str]:
    """Return what a reader should know about the table."""
    cluster, how = plan.cluster, "run" if plan.cluster.is_cpu else "simulated"
    lines = [f"{plan.listed:,} valid runs; {plan.splits} splits of them may fit by a bound"]
    lines[0] += f", and the fastest of these by an estimate were {how} until {len(plan.rows)} fitted"
    if cluster.assumed:
        lines.append(f"assumed, because --link does not say otherwise: {cluster.assumed}")
    if cluster.is_cpu:
        lines.append("~ memory is a bound: what a rank holds, gathers and keeps, without all else")
    if any(row.timing.grade == CONTENDED for row in plan.rows):
        lines.append("others used the processors meanwhile, so the order means little: plan again on a quiet machine")
    if any(row.timing.grade == Costs.grade for row in plan.rows):
        lines.append("data sheet: no such device was measured; the times order splits, for a host as fast as this one")
        lines += sources_of(cluster.device, cluster.links)
    lines += [f"left out: {name}: {why}" for name, why in plan.left_out.items()]
    return lines


def page(title: str, lines: Sequence[str], rows: Sequence[Mapping[str, str]], notes: Sequence[str], png: bytes) -> str:
    """Return the plan as HTML, in which all text is escaped and nothing is fetched from anywhere."""
    import jinja2

    page = Path(__file__).with_name("page.html").read_text()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(page)
    return template.render(title=title, lines=lines, rows=rows, notes=notes, png=base64.b64encode(png).decode())


def nothing_fits(plan: WorkPlan) -> ConfigError:
    """Return the error for work that no strategy fits, with the row that comes nearest."""
    row = plan.nearest
    if row is None:
        why = "; ".join(f"{name}: {why}" for name, why in list(plan.left_out.items())[:2])
        return ConfigError(f"no recipe accepts this work on {plan.cluster} ({why})", "in plan", "change what it names")
    return ConfigError(
        f"nothing fits on {plan.cluster}: {row.name}, micro-batches {row.detail}, comes nearest and lacks "
        f"{-row.margin / GIB:.1f} GiB of {row.cluster.memory / GIB:.1f} a device ({row.memory_words()})",
        "in plan",
        "use more devices, devices with more memory, a smaller model, or a shorter --seq-len",
    )
