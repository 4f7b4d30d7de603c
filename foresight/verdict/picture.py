"""The pictures of a verdict: the step of all ranks as a Gantt chart, and the shares of their time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gptscale.foresight.verdict.verdict import Verdict
from gptscale.results.render import DPI, SHARES, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Parts of a step that are drawn, in the colours of the shares.
COLOUR_OF = {
    "forward": "products",
    "backward": "attention",
    "optimizer": "optimizer",
    "waiting": "late rank",
    "transfer": "transfer",
    "data": "data",
    "disk": "disk",
    "bus": "bus",
    "allocator": "allocator",
}


def draw(verdict: Verdict, path: Path) -> Path:
    """Draw the last traced step, a row per rank with time to the right, and below it the shares, and return the path."""
    from matplotlib.patches import Patch

    ranks = verdict.ranks
    figure, axes = subplots(2, 1, (13, 3.2 + 0.5 * len(ranks)), verdict.line(), height_ratios=[max(1, len(ranks)), 1])
    steps: Axes = axes[0, 0]
    used: dict[str, str] = {}
    for rank, pieces in enumerate(ranks):
        for what, begin, end in pieces:
            used[what] = SHARES[COLOUR_OF.get(what, "host")][0]
            steps.broken_barh([(1e3 * begin, 1e3 * (end - begin))], (rank - 0.4, 0.8), color=used[what], linewidth=0)
    steps.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    steps.invert_yaxis()
    steps.set_xlabel("ms of the last traced step")
    handles = [Patch(color=colour, label=what) for what, colour in used.items()]
    steps.legend(handles=handles, ncols=8, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
    shares: Axes = axes[1, 0]
    begin = 0.0
    for name, share in verdict.shares.items():
        if share > 0.0:
            shares.barh(0, share, left=begin, color=SHARES[name][0], label=f"{name} {share:.0%}")
            begin += share
    shares.set(xlim=(0, 1), yticks=[], ylabel="time of the\nslowest rank")
    shares.legend(ncols=6, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.25))
    figure.savefig(path, dpi=DPI)
    return path
