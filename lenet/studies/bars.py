"""A study's figures as bars: medians of the repeats, with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptscale.lenet.studies.study import Column, values_of

COLOURS = ("#56B4E9", "#E69F00", "#009E73")


def draw_bars(groups: dict[str, list[Any]], columns: Sequence[Column], title: str, path: Path) -> None:
    """A panel per column: medians of the variants as bars, with a line from the lowest to the highest repeat."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(columns), figsize=(5 * len(columns), 1.6 + 0.42 * len(groups)), constrained_layout=True, squeeze=False
    )
    for panel, column in zip(axes[0], columns, strict=True):
        bars(panel, groups, [column], column.title)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bars(panel: Any, groups: dict[str, list[Any]], columns: Sequence[Column], title: str) -> None:
    """Medians of the variants side by side for each column, with a line from the lowest to the highest repeat."""
    height = 0.8 / len(columns)
    for k, column in enumerate(columns):
        named = column.title
        for place, values in enumerate(values_of(groups, column).values()):
            if values:
                at = place + (k - (len(columns) - 1) / 2) * height
                panel.barh(at, statistics.median(values), height, color=COLOURS[k], label=named)
                panel.plot([min(values), max(values)], [at, at], color="black", linewidth=1.5)
                named = "_"  # one entry of the legend for each column
    panel.set_yticks(range(len(groups)), list(groups))
    panel.invert_yaxis()
    panel.set_title(title, fontsize=10)
    panel.grid(axis="x", alpha=0.3)
    if len(columns) > 1:
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=len(columns))
