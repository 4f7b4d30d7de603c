"""A study's figure as bars: medians of the repeats, with a line over their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptscale.lenet.studies.study import Column, StudyResult, values_of
from gptscale.results.render import DPI, subplots

COLOURS = ("#56B4E9", "#E69F00", "#009E73")


def draw_bars(columns: Sequence[Column], result: StudyResult[Any], title: str, path: Path) -> None:
    """Write a figure with a panel of bars for each column."""
    size_in = (5.0 * len(columns), 1.6 + 0.42 * len(result.groups))
    figure, axes = subplots(1, len(columns), size_in, title)
    for panel, column in zip(axes[0], columns, strict=True):
        bars(panel, result.groups, [column], column.title)
    figure.savefig(path, dpi=DPI)


def bars(panel: Any, groups: dict[str, list[Any]], columns: Sequence[Column], title: str) -> None:
    """Draw the medians of the variants side by side for each column, with a line from the lowest to the highest repeat."""
    height = 0.8 / len(columns)
    for k, column in enumerate(columns):
        label = column.title
        for place, values in enumerate(values_of(groups, column).values()):
            if values:
                y = place + (k - (len(columns) - 1) / 2) * height
                panel.barh(y, statistics.median(values), height, color=COLOURS[k], label=label)
                panel.plot([min(values), max(values)], [y, y], color="black", linewidth=1.5)
                # matplotlib leaves labels that begin with "_" out of the legend, so each column has one entry.
                label = "_"
    panel.set_yticks(range(len(groups)), list(groups))
    panel.invert_yaxis()
    panel.set_title(title, fontsize=10)
    panel.grid(axis="x", alpha=0.3)
    if len(columns) > 1:
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=len(columns))
