"""Panels of a study's figure: bars of medians with their spread, curves by epoch, and accuracy by class."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gptscale.lenet.comparison.tables import Column, Groups, class_medians, values_of

COLOURS = ("#56B4E9", "#E69F00", "#009E73")
# Colours of curves and classes, one for each variant (Okabe & Ito 2008).
VARIANT_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")


def numbers(references: Sequence[Mapping[str, str]], columns: Sequence[Column]) -> list[tuple[str, list[float]]]:
    """Return the lines of reports that have a number in one of the columns, with their numbers, 0 for none."""
    texts = [(line["run"], [line.get(column.title, "").replace(",", "") for column in columns]) for line in references]
    every = [(name, [float(t) if t.replace(".", "", 1).isdigit() else 0.0 for t in row]) for name, row in texts]
    return [(name, row) for name, row in every if any(row)]


def bars(
    panel: Any, groups: Groups, columns: Sequence[Column], title: str, references: Sequence[Mapping[str, str]] = ()
) -> None:
    """Draw the medians of the variants side by side for each column, with a line from the lowest to the highest repeat.

    references: lines of reports, whose numbers are grey bars below.
    """
    theirs = numbers(references, columns)
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
        for place, (_, of_report) in enumerate(theirs, len(groups)):
            panel.barh(place + (k - (len(columns) - 1) / 2) * height, of_report[k], height, color="#BBBBBB")
    panel.set_yticks(range(len(groups) + len(theirs)), [*groups, *(name for name, _ in theirs)])
    panel.invert_yaxis()
    if columns[0].title == "accuracy %":
        ours = [n for values in values_of(groups, columns[0]).values() for n in values]
        lowest = min(filter(math.isfinite, ours + [n for _, (n,) in theirs]), default=0.0)
        panel.set_xlim(max(0.0, lowest - (100 - lowest) / 2), 100)
    panel.set_title(title, fontsize=10)
    panel.grid(axis="x", alpha=0.3)
    if len(columns) > 1:
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=len(columns))


def curves(
    panel: Any, variants: Groups, column: str, title: str, factor: float = 1.0,
    reports: Sequence[Mapping[str, Any]] = (),
) -> None:  # fmt: skip
    """Draw a column of epochs.csv over the epochs: thin lines for the runs of a variant, a thick one for their median.

    reports: runs of reports, whose `losses` are drawn in grey, as far as there are epochs here.
    """
    for i, (variant, epochs) in enumerate(variants.items()):
        colour = VARIANT_COLOURS[i % len(VARIANT_COLOURS)]
        for _, run in epochs.groupby("run_id", sort=False) if epochs.run_id.nunique() > 1 else ():
            panel.plot(run.epoch, factor * run[column], color=colour, linewidth=0.6, alpha=0.5)
        medians = factor * epochs.groupby("epoch")[column].median()
        dots = "o" if len(medians) <= 20 else None
        panel.plot(medians.index, medians, color=colour, marker=dots, markersize=3, label=variant)
    last = max(int(epochs.epoch.max()) for epochs in variants.values())
    for report, style in zip(reports, ("--", ":", "-."), strict=False):
        losses = report["losses"][:last]
        panel.plot(range(1, len(losses) + 1), losses, style, color="#777777", linewidth=1.2, label=report["name"])
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("epoch")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def classes(panel: Any, groups: Groups, reports: Sequence[Mapping[str, Any]] = ()) -> None:
    """Draw the accuracy of each class as dots, medians over the repeats, and those of reports as grey crosses."""
    every = [(name, list(class_medians(rows)), "o") for name, rows in groups.items()]
    every += [(report["name"], list(report["by_class"]), mark) for report, mark in zip(reports, "x+^", strict=False)]
    for i, (name, values, marker) in enumerate(every):
        shift = 0.6 * (i / max(1, len(every) - 1) - 0.5)
        places = [label + shift for label in range(len(values))]
        colour = VARIANT_COLOURS[i % len(VARIANT_COLOURS)] if marker == "o" else "#777777"
        panel.plot(places, values, marker, color=colour, markersize=4, label=name)
    panel.set_xticks(range(max(len(values) for _, values, _ in every)))
    panel.set_title("test accuracy by class (%)", fontsize=10)
    panel.grid(axis="x", alpha=0.15)
    panel.grid(axis="y", alpha=0.3)
    panel.legend(fontsize=8)


def grid(
    counts: Sequence[int], heights_in: Sequence[float], width_in: float, title: str
) -> tuple[Any, list[list[Any]]]:
    """Return a figure and its panels by row, of which row i has counts[i], equally wide, and is heights_in[i] high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, sum(heights_in)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    columns = math.lcm(*counts)
    spec = figure.add_gridspec(len(counts), columns, height_ratios=heights_in)
    rows = []
    for i, count in enumerate(counts):
        edges = range(0, columns, columns // count)
        rows.append([figure.add_subplot(spec[i, left : left + columns // count]) for left in edges])
    return figure, rows
