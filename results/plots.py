"""The picture of a comparison: loss curves that should lie on each other, how far they do not, speed and memory."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")  # files only: no display is needed, or touched
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gptscale.results.compare import Comparison, Group

# Okabe & Ito 2008: told apart by colour-blind readers too; dashes do the rest where curves cover each other.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
DASHES = ("-", (0, (6, 3)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 3)))


def steps_of(group: Group) -> pd.DataFrame | None:
    """steps.csv of the group's newest run that has one."""
    for row in group.rows.iloc[::-1].itertuples():
        file = Path(str(row.folder)) / "runs" / str(row.run_id) / "steps.csv"
        if file.is_file():
            frame = pd.read_csv(file)
            if len(frame):
                return frame
    return None


def figure_png(comparison: Comparison) -> bytes:
    """The picture as PNG bytes."""
    groups = comparison.ranked
    # single first: it is what the others are measured against
    groups = sorted(groups, key=lambda g: g.name != "single x1")
    colours = {g.name: COLOURS[i % len(COLOURS)] for i, g in enumerate(groups)}
    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), constrained_layout=True)
    figure.suptitle(_title(comparison), fontsize=11)
    curves = [(g, steps) for g in groups if (steps := steps_of(g)) is not None]
    _losses(axes[0, 0], curves, colours)
    _deviations(axes[1, 0], curves, colours)
    _bars(axes[0, 1], groups, colours, "tokens_per_s", "tokens/s, all devices (bar: median, line: spread)")
    on_device = any(g.median("peak_mem_allocated_gib") is not None for g in groups)
    column = "peak_mem_allocated_gib" if on_device else "peak_rss_gib"
    _bars(
        axes[1, 1], groups, colours, column, "peak memory of a process, GiB" + ("" if on_device else " (host: no GPU)")
    )
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)
    return file.getvalue()


def _title(comparison: Comparison) -> str:
    row = comparison.ranked[0].rows.iloc[0]
    return (
        f"{row.model}: {row.n_params:,.0f} parameters, sequence {row.seq_len}, global batch {row.global_batch_size}, "
        f"{row.precision}, data {row.data}\n{row.device}, torch {row.torch_version}"
    )


def _losses(axis: Axes, curves: list[tuple[Group, pd.DataFrame]], colours: dict[str, str]) -> None:
    for i, (group, steps) in enumerate(curves):
        # the first widest: every later curve is seen on it, and a single visible line means that they agree
        width = 4.5 if i == 0 and len(curves) > 1 else 1.6
        axis.plot(steps.step, steps.loss, color=colours[group.name], linestyle=DASHES[i % len(DASHES)], linewidth=width,
                  alpha=0.35 if i == 0 and len(curves) > 1 else 1.0, label=group.name)  # fmt: skip
    axis.set(title="training loss: the curves must lie on each other", xlabel="step", ylabel="loss (nats per token)")
    axis.grid(alpha=0.25)
    if curves:
        axis.legend(frameon=False)


def _deviations(axis: Axes, curves: list[tuple[Group, pd.DataFrame]], colours: dict[str, str]) -> None:
    axis.grid(alpha=0.25)
    if len(curves) < 2:
        axis.set(title="deviation of loss: needs two runs")
        return
    reference, base = curves[0]
    resolution = float(np.finfo(np.float32).eps)  # a float32 loss cannot agree better than this
    for i, (group, steps) in enumerate(curves[1:], start=1):
        both = base.merge(steps, on="step", suffixes=("_base", ""))
        deviation = (both.loss - both.loss_base).abs() / both.loss_base.abs()
        axis.plot(both.step, deviation.clip(lower=resolution / 2), color=colours[group.name], linestyle=DASHES[i % len(DASHES)],
                  label=f"{group.name}: at most {deviation.max():.1e}")  # fmt: skip
    axis.axhline(resolution, color="grey", linewidth=0.8)
    axis.annotate(
        "float32 resolution",
        (0.99, resolution),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
        color="grey",
    )
    axis.set(
        title=f"relative deviation of loss from {reference.name}",
        xlabel="step",
        yscale="log",
        ylim=(resolution / 3, None),
    )
    low, high = axis.get_ylim()
    axis.set_ylim(low, max(high, 1e-4))
    axis.legend(frameon=False)


def _bars(axis: Axes, groups: list[Group], colours: dict[str, str], column: str, title: str) -> None:
    names = [g.name for g in groups]
    values = [g.median(column) for g in groups]
    axis.barh(names, [v or 0.0 for v in values], color=[colours[n] for n in names], alpha=0.85)
    top = max((v for v in values if v), default=1.0)
    for i, (group, value) in enumerate(zip(groups, values, strict=True)):
        spread = group.spread() if column == "tokens_per_s" and value else None
        reach = value or 0.0
        if spread and value:
            ranks = value / (group.median("tokens_per_s_per_device") or value)
            low, high = (s * ranks for s in spread)
            axis.plot([low, high], [i, i], color="#444444", linewidth=1.5, marker="|")
            reach = max(high, value)
        text = (
            " ".join(sorted(set(group.rows.status)))
            if value is None
            else f"{value:,.0f}"
            if value >= 100
            else f"{value:.2f}"
        )
        axis.annotate(text, (reach + 0.01 * top, i), va="center", fontsize=9)
        top = max(top, reach)
    axis.set(title=title, xlim=(0, 1.18 * top))
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.25)
