"""The picture of `gptscale bench memory`: for each model the largest batch by each way, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, or touched
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gptscale.launchers.bench.memory.ladder import ways_in

if TYPE_CHECKING:
    from gptscale.launchers.bench.memory.command import Found
    from gptscale.launchers.bench.memory.ladder import Ladder

MEASURED, PREDICTED = "#0072B2", "#E69F00"  # Okabe & Ito 2008


def draw(ladder: Ladder, path: Path) -> None:
    """Write the PNG: a panel per model, a line per way, dots on a logarithmic axis of batches."""
    models, ways = list(dict.fromkeys(f.job.model for f in ladder.found)), ways_in(ladder.found)
    size = (3.2 + 2.6 * len(models), 1.6 + 0.3 * len(ways))
    figure, axes = plt.subplots(1, len(models), figsize=size, sharey=True, squeeze=False, constrained_layout=True)
    figure.suptitle(ladder.heading(), fontsize=8)
    for axis, model in zip(axes[0], models, strict=True):
        panel(axis, ladder, [f for f in ladder.found if f.job.model == model], [str(way) for way in ways])
        axis.set_title(model, fontsize=9)
    figure.legend(*legend(), fontsize=7, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def panel(axis: Axes, ladder: Ladder, found: list[Found], ways: list[str]) -> None:
    """One model: filled dots measured, with tokens/s; hollow ones predicted; words where nothing fits."""
    for each in found:
        y, cells = ways.index(str(each.job.way)), ladder.cells(each)
        if each.predicted:
            axis.plot(each.predicted, y, "o", markersize=9, color=PREDICTED, fillstyle="none")
        if cells["fits"] == "yes":
            axis.plot(int(cells["batch"]), y, "o", markersize=5, color=MEASURED)
            axis.annotate(f"  {cells['tokens/s']}", (int(cells["batch"]), y), va="center", fontsize=6)
        elif cells["fits"] != "?":
            said = "does not fit" if cells["fits"] == "no" else cells["fits"]
            axis.annotate(said, (0.98, y), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=6)
    axis.set(xscale="log", xlim=(0.7, None), xlabel="largest micro-batch, with tokens/s")
    axis.set_yticks(range(len(ways)), ways, fontsize=7)
    axis.set_ylim(len(ways) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)


def legend() -> tuple[list[plt.Line2D], list[str]]:
    """What the two dots are."""
    dots = [
        plt.Line2D([], [], color=MEASURED, marker="o", markersize=5, linestyle=""),
        plt.Line2D([], [], color=PREDICTED, marker="o", markersize=9, fillstyle="none", linestyle=""),
    ]
    return dots, ["measured", "predicted"]
