"""The picture of a comparison: loss curves, which should lie on each other, their deviation, speed and memory."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from gptscale.results.comparison.groups import Comparison, Group
from gptscale.results.comparison.run_files import clip, read_shares, read_steps
from gptscale.results.render import DPI, SHARE_COLOURS, subplots

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Okabe & Ito 2008: colour-blind readers can tell these apart too. Dashes help where curves cover each other.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
# A legend of many curves.
SMALL: dict[str, Any] = {"ncols": 2, "fontsize": 6.5, "loc": "upper right"}
# A picture of more groups could not be read, and one of 1,200 not be drawn. A curve has no more points than pixels.
GROUPS_MAX, POINTS = 40, 2000
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))


def steps_of(group: Group) -> pd.DataFrame | None:
    """Return the steps and losses of the group's newest run that has some, None if none has.

    What is wrong with a steps.csv on the way is added to the group's notes.
    """
    for folder, run_id in reversed(group.with_files):
        steps, damage = read_steps(folder, run_id)
        if damage:
            group.notes.append(f"{run_id}: {damage}")
        if len(steps):
            return steps
    return None


def shares_of(group: Group) -> dict[str, float]:
    """Return what the time of the group's newest run with a verdict went to, none without one."""
    rows = group.rows[group.rows.has_files][::-1]
    of_runs = (read_shares(folder, run_id) for folder, run_id in zip(rows.folder, rows.run_id, strict=True))
    return next((shares for shares in of_runs if shares), {})


def thinned(steps: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return at most about POINTS rows that look the same when they are drawn.

    These are the rows with the lowest and the highest value of the column in each of equally long parts.
    """
    if len(steps) <= POINTS:
        return steps
    part = np.arange(len(steps)) * (POINTS // 2) // len(steps)
    values = steps[column].fillna(steps[column].median()).groupby(part)
    return steps.loc[np.unique(np.concatenate([values.idxmin(), values.idxmax()]))]


def figure_png(comparison: Comparison) -> bytes:
    """Draw the ranked groups as a PNG, `single` first because the others are measured against it."""
    groups = sorted(comparison.ranked, key=lambda group: group.recipe != "single")[:GROUPS_MAX]
    colours = {group.name: COLOURS[i % len(COLOURS)] for i, group in enumerate(groups)}
    height_in = max(7.5, 2 + 0.55 * len(groups))
    shares = [(group, of_group) for group in groups if (of_group := shares_of(group))]
    rows, heights = (3, [3, 3, 1 + 0.12 * len(shares)]) if shares else (2, [1, 1])
    height_in *= sum(heights) / sum(heights[:2])
    options = {"height_ratios": heights}
    figure, axes = subplots(rows, 2, (12, height_in), _title(comparison), title_size=11, **options)
    if shares:
        _shares(axes[2, 0], axes[2, 1], shares)
    curves = [(group, steps) for group in groups if (steps := steps_of(group)) is not None]
    _losses(axes[0, 0], curves, colours)
    _deviations(axes[1, 0], curves, colours)
    _bars(axes[0, 1], groups, colours, "tokens_per_s", "tokens/s of all devices (line: spread)")
    on_device = any(group.median("peak_mem_allocated_gib") is not None for group in groups)
    column, what = ("peak_mem_allocated_gib", "device") if on_device else ("peak_rss_gib", "host")
    _bars(axes[1, 1], groups, colours, column, f"peak {what} memory of one process (GiB)")
    file = io.BytesIO()
    with warnings.catch_warnings():
        # The fonts of matplotlib lack some letters that a foreign summary may have.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(file, format="png", dpi=DPI)
    return file.getvalue()


def _title(comparison: Comparison) -> str:
    row = comparison.ranked[0].first
    left_out = len(comparison.ranked) - GROUPS_MAX
    return (
        f"{row.model}: {row.n_params:,.0f} parameters, sequence {row.seq_len}, global batch {row.global_batch_size}, "
        f"{row.precision}, data {clip(row.data, 60)}\n{row.device}, torch {row.torch_version}"
        + (f"\n{left_out:,} slower groups are not drawn" if left_out > 0 else "")
    ).replace("$", r"\$")


def _label(group: Group) -> str:
    """Return the group's name as a short text, in which a dollar sign begins no formula."""
    return clip(group.name, 60).replace("$", r"\$")


def _losses(axis: Axes, curves: list[tuple[Group, pd.DataFrame]], colours: dict[str, str]) -> None:
    axis.set(title="training loss: the curves must lie on each other", xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.25)
    for i, (group, steps) in enumerate(curves):
        # The first curve is wide and pale, so that every later one is visible on it. A single visible line means that all agree.
        width, alpha = (5.0, 0.35) if i == 0 and len(curves) > 1 else (1.6, 1.0)
        style: dict[str, Any] = {
            "color": colours[group.name],
            "linestyle": DASHES[i % len(DASHES)],
            "linewidth": width,
            "alpha": alpha,
        }
        shown = thinned(steps, "loss")
        axis.plot(shown.step, shown.loss, label=_label(group), **style)
    if curves:
        axis.legend(frameon=False, **SMALL if len(curves) > 8 else {})
    else:
        _say_empty(axis, "no steps.csv beside these rows")


def _deviations(axis: Axes, curves: list[tuple[Group, pd.DataFrame]], colours: dict[str, str]) -> None:
    if len(curves) < 2:
        axis.set(title="relative deviation of loss")
        return _say_empty(axis, "needs the steps of two runs")
    (reference, base), resolution = curves[0], float(np.finfo(np.float32).eps)
    for i, (group, steps) in enumerate(curves[1:], start=1):
        both = base.merge(steps, on="step", suffixes=("_base", ""))
        both["deviation"] = (both.loss - both.loss_base).abs() / both.loss_base.abs().clip(lower=1e-300)
        label, dashes = f"{_label(group)}: at most {both.deviation.max():.1e}", DASHES[i % len(DASHES)]
        shown = thinned(both, "deviation")
        # Equal losses get a place on the logarithmic axis too.
        drawn = shown.deviation.clip(resolution / 2, 1e30)
        axis.plot(shown.step, drawn, color=colours[group.name], linestyle=dashes, label=label)
    axis.axhline(resolution, color="grey", linewidth=0.8, label="resolution of float32")
    axis.set(title=f"relative deviation of loss from {_label(reference)}", xlabel="step", yscale="log")
    axis.set_ylim(resolution / 3, max(axis.get_ylim()[1], 1e-4))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, **SMALL if len(curves) > 8 else {})


def _bars(axis: Axes, groups: list[Group], colours: dict[str, str], column: str, title: str) -> None:
    """Draw one bar per group with its figure behind it, or in red what became of a group that has none."""
    from matplotlib.ticker import StrMethodFormatter

    values = [group.median(column) for group in groups]
    top = max((value for value in values if value), default=1.0)
    for i, (group, value) in enumerate(zip(groups, values, strict=True)):
        axis.barh(i, value or 0.0, color=colours[group.name], alpha=0.85)
        spread = group.spread if column == "tokens_per_s" else None
        if spread:
            axis.plot(spread, (i, i), color="#555555", linewidth=1.5, marker="|")
        reach = max(value or 0.0, spread[1] if spread else 0.0)
        status = " ".join(sorted({*group.statuses} - {"ok"}))
        text = status or "-" if value is None else _shown(value)
        colour = "#B00020" if value is None and status else "black"
        axis.annotate(text, (reach + 0.012 * top, i), va="center", fontsize=9, color=colour)
        top = max(top, reach)
    axis.set(title=title, xlim=(0, 1.16 * top))
    axis.set_yticks(range(len(groups)), [_label(group) for group in groups])
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if top >= 10 else "{x:g}"))
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _shares(axis: Axes, beside: Axes, shares: list[tuple[Group, dict[str, float]]]) -> None:
    """Draw one bar per group, cut into what the time of its ranks went to, with the legend beside it."""
    begins = [0.0] * len(shares)
    for name, colour in SHARE_COLOURS.items():
        parts = [of_group.get(name, 0.0) for _, of_group in shares]
        if any(part >= 0.005 for part in parts):
            axis.barh(range(len(shares)), parts, left=begins, color=colour, label=name)
            begins = [begin + part for begin, part in zip(begins, parts, strict=True)]
    axis.set(title="what the time of the ranks goes to (gptscale why)", xlim=(0, 1))
    axis.set_yticks(range(len(shares)), [_label(group) for group, _ in shares])
    axis.invert_yaxis()
    beside.axis("off")
    beside.legend(*axis.get_legend_handles_labels(), frameon=False, ncols=2, loc="center left", fontsize=8)


def _say_empty(axis: Axes, why: str) -> None:
    axis.text(0.5, 0.5, why, ha="center", va="center", color="grey", transform=axis.transAxes)
