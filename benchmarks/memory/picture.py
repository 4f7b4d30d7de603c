"""The picture of `python -m benchmarks.memory`: for each model the largest batch by each way, measured and predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.memory.ladder import Ladder
from benchmarks.memory.trial import JobSearch
from gptscale.results.render import DPI, subplots

# Okabe & Ito 2008
MEASURED, PREDICTED = "#0072B2", "#E69F00"


def draw(ladder: Ladder, path: Path) -> None:
    """Write the PNG: a panel per model, a line per way, dots on a logarithmic axis of batches."""
    models = list(dict.fromkeys(search.job.model for search in ladder.searches))
    ways = list(dict.fromkeys(str(search.job.way) for search in ladder.searches))
    size_in = (3.2 + 2.6 * len(models), 1.6 + 0.3 * len(ways))
    figure, axes = subplots(1, len(models), size_in, ladder.heading(), title_size=8, sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        draw_panel(axis, ladder, [search for search in ladder.searches if search.job.model == model], ways)
        axis.set_title(model, fontsize=9)
    dots = [
        Line2D([], [], color=MEASURED, marker="o", markersize=5, linestyle=""),
        Line2D([], [], color=PREDICTED, marker="o", markersize=9, fillstyle="none", linestyle=""),
    ]
    figure.legend(dots, ["measured", "predicted"], fontsize=7, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=DPI)


def draw_panel(axis: Axes, ladder: Ladder, searches: Sequence[JobSearch], ways: list[str]) -> None:
    """Draw one model: filled dots measured, with tokens/s, hollow ones predicted, and words where nothing fits."""
    for search in searches:
        y, cells = ways.index(str(search.job.way)), ladder.cells(search)
        if search.predicted:
            axis.plot(search.predicted, y, "o", markersize=9, color=PREDICTED, fillstyle="none")
        if cells["fits"] == "yes":
            axis.plot(int(cells["batch"]), y, "o", markersize=5, color=MEASURED)
            axis.annotate(f"  {cells['tokens/s']}", (int(cells["batch"]), y), va="center", fontsize=6)
        elif cells["fits"] != "?":
            text = "does not fit" if cells["fits"] == "no" else cells["fits"]
            axis.annotate(text, (0.98, y), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=6)
    axis.set(xscale="log", xlim=(0.7, None), xlabel="largest micro-batch, with tokens/s")
    axis.set_yticks(range(len(ways)), ways, fontsize=7)
    axis.set_ylim(len(ways) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
