"""The picture of `gptscale bench model`: tokens/s of all contenders under their ceiling, and the waterfall of our step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, or touched
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gptscale.launchers.bench.model.command import ON_CUDA, OURS

if TYPE_CHECKING:
    from gptscale.launchers.bench.model.report import Report

MEASURED, FLOOR, OTHER = "#E69F00", "#0072B2", "#999999"  # Okabe & Ito 2008


def draw(report: Report, path: Path) -> None:
    """Write the PNG."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 4.6), constrained_layout=True)
    c = report.circumstances()
    sizes = f"hidden {c['hidden']}, {c['layers']} layers, sequence {c['seq_len']}, vocabulary {c['vocab_size']}"
    figure.suptitle(
        f"{sizes}, batch {c['batch_size']}, {c['dtype']}; {c['device']}, torch {c['torch_version']}", fontsize=10
    )
    contenders(left, report)
    if report.ours.parts:
        waterfall(right, report)
    else:
        right.set_axis_off()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def contenders(axis: Axes, report: Report) -> None:
    """Bars of tokens/s with p10 to p90; the line is what the matrix products alone would allow."""
    rows = [report.row(found) for found in reversed(report.found)]
    tokens = report.bench.tokens
    for i, row in enumerate(rows):
        axis.barh(i, row["tokens_per_s"], color=FLOOR if row["name"] in OURS + ON_CUDA else OTHER, height=0.6)
        axis.plot([tokens / row["seconds_p90"], tokens / row["seconds_p10"]], [i, i], color="black", linewidth=1.5)
        axis.text(0, i + 0.33, f" {row['tokens_per_s']:,.0f}", va="bottom", fontsize=8)
    axis.axvline(tokens / report.gemm_s, color="black", linestyle="--", linewidth=1, label="matrix products alone")
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set(xlabel="tokens/s (line: p10 to p90)")
    axis.set_title("whole steps", fontsize=10)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8)


def waterfall(axis: Axes, report: Report) -> None:
    """Microseconds per token, part by part from the left; each bar's floor and what lies above it."""
    found, least = report.parts(report.ours), report.floors()
    total, begin = sum(found.values()), 0.0
    bars = [(part, us, least[part]) for part, us in found.items()]
    for i, (part, us, floor) in enumerate([*bars, ("all", total, sum(least.values()))]):
        begin = 0.0 if part == "all" else begin
        low = min(us, floor)
        axis.barh(i, low, left=begin, color=FLOOR, height=0.6, label=None if i else "floor")
        axis.barh(i, us - low, left=begin + low, color=MEASURED, height=0.6, label=None if i else "above it")
        wide = us > 0.4 * total
        at, side = (begin, "left") if wide else (begin + us, "left") if begin + us < 0.6 * total else (begin, "right")
        said = f" {us:,.2f} (floor {floor:,.2f}) "
        axis.text(at, i, said, va="center", ha=side, fontsize=8, color="white" if wide else "black")
        begin += us
    axis.set_yticks(range(len(bars) + 1), [*found, "all"])
    axis.set(xlim=(0, 1.02 * total), xlabel="microseconds per token")
    axis.set_title(f"where a step of {report.ours.name} goes, over the roofline", fontsize=10)
    axis.invert_yaxis()
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 0.2), fontsize=8)
