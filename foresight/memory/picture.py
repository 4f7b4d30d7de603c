"""Pictures of memory over a step, by owner, of one rank or of several beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from gptscale.foresight.memory.report import GIB
from gptscale.foresight.memory.timeline import Timeline
from gptscale.results.render import DPI, subplots

# Okabe & Ito 2008, and two greys
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#555555", "#BBBBBB")
# What lives longest lies at the bottom.
ORDER = (
    "parameter",
    "optimizer state",
    "gradient",
    "bucket",
    "gathered shard",
    "activation",
    "logits and loss",
    "under way in backward",
    "under way in the optimizer",
    "other",
)
POINTS_MAX = 4000


def draw(timelines: Mapping[str, Timeline], path: Path, title: str = "") -> None:
    """Write a panel for each timeline, with its last step: time is counted in allocations."""
    figure, axes = subplots(1, len(timelines), (4.2 * len(timelines) + 2, 3.6), title, sharey=True)
    for axis, (name, timeline) in zip(axes[0], timelines.items(), strict=True):
        draw_step(axis, timeline)
        axis.set_title(name, fontsize=9)
    axes[0][0].set_ylabel("GiB")
    patches: dict[str, object] = {}
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        patches |= dict(zip(labels, handles, strict=True))
    figure.legend(patches.values(), patches.keys(), fontsize=7, loc="outside right center", reverse=True)
    figure.savefig(path, dpi=DPI)


def draw_step(axis: Axes, timeline: Timeline) -> None:
    """Draw the last step of a timeline as layers, one for each kind of owner, with lines where its parts begin."""
    begin, end = timeline.steps[-1], timeline.times
    curves = timeline.curves(begin, end)
    every = max(1, (end - begin) // POINTS_MAX)
    # Of each group of events the largest, so that no peak is lost.
    kinds = [kind for kind in ORDER if kind in curves and curves[kind].any()]
    total = np.sum([curves[kind] for kind in kinds], axis=0)
    points = [i + int(np.argmax(total[i : i + every])) for i in range(0, end - begin, every)]
    layers = [curves[kind][points] / GIB for kind in kinds]
    colours = [COLOURS[ORDER.index(kind)] for kind in kinds]
    axis.stackplot([begin + p for p in points], layers, labels=kinds, colors=colours, linewidth=0)
    for time, part in timeline.marks:
        if begin <= time < end and part in ("backward", "optimizer"):
            axis.axvline(time, color="black", linewidth=0.4, alpha=0.5)
    axis.set(xlim=(begin, end), ylim=(0, None), xlabel="allocations, in order")
    axis.annotate(
        f"{timeline.peak_of(begin) / GIB:,.3f} GiB", (0.02, 0.97), xycoords="axes fraction", va="top", fontsize=7
    )
