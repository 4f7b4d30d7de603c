"""The picture of a comparison: losses, then a line for each group with deviation, speed, memory and time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gptscale.results.comparison.groups import Comparison, Group
from gptscale.results.comparison.memory_bars import draw_memory
from gptscale.results.comparison.run_files import clip, read_shares, read_steps
from gptscale.results.render import DPI, SHARE_COLOURS, legend_below, subplots

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Okabe & Ito 2008: colour-blind readers can tell these apart too. Dashes help where curves cover each other.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))
FAILED = "#B00020"
# A picture of more groups could not be read, and one of 1,200 not be drawn. A curve has no more points than pixels.
GROUPS_MAX, POINTS = 40, 2000


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
    of_runs = (read_shares(folder, run_id) for folder, run_id in reversed(group.with_files))
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
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(groups))]
    shares, curves = [shares_of(group) for group in groups], [steps_of(group) for group in groups]
    # The room for the legends below the panels does not grow with the groups.
    height_in = 1.6 + 0.21 * len(groups)
    figure, axes = subplots(3 if any(shares) else 2, 2, (13, height_in * (3 if any(shares) else 2)), _title(comparison))
    _losses(axes[0, 0], curves, colours)
    _deviations(axes[0, 1], curves, colours)
    _speeds(axes[1, 0], groups, colours, comparison.baseline)
    draw_memory(axes[1, 1], groups, colours)
    with_lines = list(axes.flat[1:4])
    if any(shares):
        # Both places of the last row, because shares are many and small.
        for axis in axes[2]:
            axis.remove()
        wide = figure.add_subplot(axes[2, 0].get_gridspec()[2, :])
        _shares(wide, shares)
        with_lines.append(wide)
    for axis in with_lines:
        _name_lines(axis, groups)
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
        f"{row['model']}: {row['n_params']:,.0f} parameters, sequence {row['seq_len']}, global batch {row['global_batch_size']}, "
        f"{row['precision']}, data {clip(row['data'], 60)}\n{row['device']}, torch {row['torch_version']}"
        + (f"\n{left_out:,} slower groups are not drawn" if left_out > 0 else "")
    ).replace("$", r"\$")


def _name_lines(axis: Axes, groups: Sequence[Group]) -> None:
    """Give each group its line, with a short name in which a dollar sign begins no formula."""
    axis.set_yticks(range(len(groups)), [clip(group.name, 60).replace("$", r"\$") for group in groups], fontsize=9)
    axis.set_ylim(len(groups) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.25)
    axis.set_axisbelow(True)


def _losses(axis: Axes, curves: Sequence[pd.DataFrame | None], colours: Sequence[str]) -> None:
    axis.set(title="training loss: the curves must lie on each other", xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.25)
    drawn = [(steps, colour) for steps, colour in zip(curves, colours, strict=True) if steps is not None]
    for i, (steps, colour) in enumerate(drawn):
        # The first curve is wide and pale, so that every later one is visible on it. A single visible line means that all agree.
        width, alpha = (5.0, 0.35) if i == 0 and len(drawn) > 1 else (1.6, 1.0)
        shown, dashes = thinned(steps, "loss"), DASHES[i % len(DASHES)]
        axis.plot(shown.step, shown.loss, color=colour, linestyle=dashes, linewidth=width, alpha=alpha)
    if not drawn:
        axis.text(0.5, 0.5, "no steps.csv", ha="center", va="center", color="grey", transform=axis.transAxes)


def _deviations(axis: Axes, curves: Sequence[pd.DataFrame | None], colours: Sequence[str]) -> None:
    """Draw how far each curve is from the first one at most, in the colours of the curves."""
    resolution, reference = float(np.finfo(np.float32).eps), next((s for s in curves if s is not None), None)
    largest = [_largest_deviation(reference, steps) for steps in curves]
    high = max([1e-4, *(30 * value for value in largest if value is not None and value < 1e30)])
    low = resolution / 30
    axis.set(title="largest relative deviation of the loss from the first", xscale="log", xlim=(low, high))
    axis.axvline(resolution, color="grey", linewidth=0.9, linestyle="--", label="resolution of float32")
    for i, (value, steps) in enumerate(zip(largest, curves, strict=True)):
        if steps is None or steps is reference:
            axis.annotate(
                "  no steps" if steps is None else "  all others beside this", (low, i), va="center", fontsize=8
            )
            continue
        at = high if value is None else min(max(value, low), high)
        axis.plot((low, at), (i, i), color=colours[i], linewidth=1.2)
        axis.plot(at, i, color=colours[i], marker="o")
        text = "no common step" if value is None else f"{value:.1e}" if value else "0"
        axis.annotate(f"   {text}", (at, i), va="center", fontsize=8)
    legend_below(axis)


def _largest_deviation(reference: pd.DataFrame | None, steps: pd.DataFrame | None) -> float | None:
    """Return the largest relative deviation of a loss at the same step, None without a common step."""
    if reference is None or steps is None:
        return None
    both = reference.merge(steps, on="step", suffixes=("_reference", ""))
    deviation = (both.loss - both.loss_reference).abs() / both.loss_reference.abs().clip(lower=1e-300)
    return float(deviation.max()) if deviation.notna().any() else None


def _speeds(axis: Axes, groups: Sequence[Group], colours: Sequence[str], baseline: Group | None) -> None:
    """Draw a bar for each group with its speed and its speed-up, or in red what became of a group that has none."""
    from matplotlib.ticker import StrMethodFormatter

    values = [group.median("tokens_per_s") for group in groups]
    base = baseline.median("tokens_per_s") if baseline else None
    top = max((group.spread[1] for group in groups if group.spread), default=1.0)
    for i, (group, value) in enumerate(zip(groups, values, strict=True)):
        axis.barh(i, value or 0.0, color=colours[i], alpha=0.85)
        if group.spread:
            axis.plot(group.spread, (i, i), color="#555555", linewidth=1.5, marker="|")
        status = " ".join(sorted({*group.statuses} - {"ok"}))
        text = status or "-"
        if value is not None:
            text = (f"{value:,.0f}" if value >= 100 else f"{value:.2f}") + (f"  {value / base:.2f}x" if base else "")
        at = max(value or 0.0, group.spread[1] if group.spread else 0.0) + 0.012 * top
        axis.annotate(text, (at, i), va="center", fontsize=9, color=FAILED if value is None and status else "black")
    versus = f" and times that of {clip(baseline.name, 30)}" if baseline else ""
    axis.set(title=f"tokens/s of all devices{versus}".replace("$", r"\$"), xlim=(0, 1.3 * top), xlabel="line: spread")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if top >= 10 else "{x:g}"))


def _shares(axis: Axes, shares: Sequence[dict[str, float]]) -> None:
    """Draw one bar per group, cut into what the time of its ranks went to."""
    begins = [0.0] * len(shares)
    for name, colour in SHARE_COLOURS.items():
        parts = [of_group.get(name, 0.0) for of_group in shares]
        if any(part >= 0.005 for part in parts):
            axis.barh(range(len(shares)), parts, left=begins, color=colour, label=name)
            begins = [begin + part for begin, part in zip(begins, parts, strict=True)]
    axis.set(title="what the time of the ranks goes to (gptscale why)", xlim=(0, 1))
    legend_below(axis, columns=12)
