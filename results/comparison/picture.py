"""The picture of a comparison: losses, then a line for each group with deviation, speed, memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gptscale.common.errors import ConfigError
from gptscale.results.comparison.groups import Comparison, Group
from gptscale.results.comparison.memory_bars import draw_memory
from gptscale.results.comparison.run_files import clip, read_shares, read_steps
from gptscale.results.render import SHARES, legend_below, subplots

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008: colour-blind readers can tell these apart too. Dashes help where curves cover each other.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))
FAILED = "#B00020"
# Inches of a panel alone, which a phone shows as wide as its screen, and letters of a name in it.
PANEL_IN, PANEL_NAME = 5.6, 30
# A picture of more groups could not be read, and one of 1,200 not be drawn.
GROUPS_MAX = 40


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


class Drawing:
    """The panels of a comparison, all on one figure or each on its own.

    panels: their names. `time` is there if a run has a verdict. Of the ranked groups `single` comes first, because the others
    are measured against it. What is wrong with the steps of a run is added to its group's notes.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.groups = sorted(comparison.ranked, key=lambda group: group.recipe != "single")[:GROUPS_MAX]
        self.colours = [COLOURS[i % len(COLOURS)] for i in range(len(self.groups))]
        self.shares = [shares_of(group) for group in self.groups]
        self.curves = [steps_of(group) for group in self.groups]
        self.panels = ("loss", "deviation", "speed", "memory", *(("time",) if any(self.shares) else ()))
        # The room for the legends below the panels does not grow with the groups.
        self.height_in = max(2.6, 1.6 + 0.21 * len(self.groups))

    def figure(self) -> Figure:
        n_rows = (len(self.panels) + 1) // 2
        figure, axes = subplots(n_rows, 2, (13, self.height_in * n_rows), _title(self.comparison))
        places = list(axes.flat)
        if "time" in self.panels:
            # Both places of the last row, because shares are many and small.
            for axis in axes[2]:
                axis.remove()
            places[4] = figure.add_subplot(axes[2, 0].get_gridspec()[2, :])
        for panel, axis in zip(self.panels, places, strict=False):
            self._draw(panel, axis)
        return figure

    def panel(self, name: str) -> Figure:
        """Return one panel, as wide as a column of a paper, with a legend of its own and without the title of the work.

        Raises ConfigError for a panel that this comparison does not have.
        """
        if name not in self.panels:
            raise ConfigError(f"there is no panel {name!r}", "in --panel", f"choose from: {' '.join(self.panels)}")
        for_legend = 2.2 if name in ("memory", "time") else 0.8
        figure, ((axis,),) = subplots(1, 1, (PANEL_IN, self.height_in + for_legend))
        self._draw(name, axis, alone=True)
        return figure

    def _draw(self, panel: str, axis: Axes, alone: bool = False) -> None:
        baseline = self.comparison.baseline
        if panel == "loss":
            names = [_name(group, PANEL_NAME) for group in self.groups] if alone else []
            _losses(axis, self.curves, self.colours, names)
            return
        if panel == "deviation":
            _deviations(axis, self.curves, self.colours)
        elif panel == "speed":
            _speeds(axis, self.groups, self.colours, baseline)
        elif panel == "memory":
            draw_memory(axis, self.groups, self.colours, alone)
        else:
            _shares(axis, self.shares, columns=1 if alone else 3)
        names = [_name(group, PANEL_NAME if alone else 60) for group in self.groups]
        axis.set_yticks(range(len(self.groups)), names, fontsize=9)
        axis.set_ylim(len(self.groups) - 0.4, -0.6)
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)


def _name(group: Group, letters: int) -> str:
    """Return a short name in which a dollar sign begins no formula."""
    return clip(group.name, letters).replace("$", r"\$")


def _title(comparison: Comparison) -> str:
    row = comparison.ranked[0].first
    left_out = len(comparison.ranked) - GROUPS_MAX
    return (
        f"{row['model']}: {row['n_params']:,.0f} parameters, sequence {row['seq_len']}, global batch {row['global_batch_size']}, "
        f"{row['precision']}, data {clip(row['data'], 60)}\n{row['device']}, torch {row['torch_version']}"
        + (f"\n{left_out:,} slower groups are not drawn" if left_out > 0 else "")
    ).replace("$", r"\$")


def _losses(axis: Axes, curves: Sequence[pd.DataFrame | None], colours: Sequence[str], names: Sequence[str]) -> None:
    """Draw the losses of all groups. names: those of the groups for a legend, none where other panels name the colours."""
    axis.set(title="training loss: the curves must lie on each other", xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.25)
    named = zip(curves, colours, names or [""] * len(curves), strict=True)
    drawn = [(steps, colour, name) for steps, colour, name in named if steps is not None]
    for i, (steps, colour, name) in enumerate(drawn):
        # The first curve is wide and pale, so that every later one is visible on it. A single visible line means that all agree.
        width, alpha = (5.0, 0.35) if i == 0 and len(drawn) > 1 else (1.6, 1.0)
        dashes = DASHES[i % len(DASHES)]
        axis.plot(steps.step, steps.loss, color=colour, linestyle=dashes, linewidth=width, alpha=alpha, label=name)
    if drawn and names:
        legend_below(axis, columns=2)
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
            what = "no steps" if steps is None else "all others beside this"
            axis.annotate(f"  {what}", (low, i), va="center", fontsize=8)
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
    ends = (group.spread[1] for group in groups if group.spread)
    top = max([*(value or 0.0 for value in values), *ends], default=0.0) or 1.0
    for i, (group, value) in enumerate(zip(groups, values, strict=True)):
        axis.barh(i, value or 0.0, color=colours[i], alpha=0.85)
        if group.spread:
            axis.plot(group.spread, (i, i), color="#555555", linewidth=1.5, marker="|")
        status = " ".join(sorted({*group.statuses} - {"ok"}))
        text = status or "-"
        if value is not None:
            text = (f"{value:,.0f}" if value >= 100 else f"{value:.2f}") + (f"  {value / base:.2f}x" if base else "")
            tflops = group.median("tflops_per_device")
            text += f"  {tflops:.3g}" if tflops else ""
        at = max(value or 0.0, group.spread[1] if group.spread else 0.0) + 0.012 * top
        axis.annotate(text, (at, i), va="center", fontsize=9, color=FAILED if value is None and status else "black")
    versus = f", and times that of {clip(baseline.name, 30)}" if baseline else ""
    axis.set(title=f"tokens/s of all devices{versus}".replace("$", r"\$"), xlim=(0, 1.5 * top))
    axis.set_xlabel(f"line: spread; numbers: tokens/s{', speed-up' if base else ''}, TFLOP/s of a device")
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if top >= 10 else "{x:g}"))


def _shares(axis: Axes, shares: Sequence[dict[str, float]], columns: int) -> None:
    """Draw one bar per group, cut into what the time of its ranks went to."""
    begins = [0.0] * len(shares)
    for name, (colour, meaning) in SHARES.items():
        parts = [of_group.get(name, 0.0) for of_group in shares]
        if any(part >= 0.005 for part in parts):
            label = name if name == meaning else f"{name}: {meaning}"
            axis.barh(range(len(shares)), parts, left=begins, color=colour, label=label)
            begins = [begin + part for begin, part in zip(begins, parts, strict=True)]
    axis.set(title="what the time of the ranks goes to (gptscale why)", xlim=(0, 1))
    legend_below(axis, columns=columns)
