"""The pictures of the model's bench: all contenders under their ceiling beside the parts of our step, and scaling."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from benchmarks.model.options import OF_THIS_PACKAGE, ON_CUDA
from benchmarks.model.report import Report
from benchmarks.model.scale import AXIS, ScalingLine
from gptscale.results.render import DPI, subplots

# Okabe & Ito 2008
MEASURED, FLOOR, OTHER, POINT = "#E69F00", "#0072B2", "#999999", "#D55E00"


def draw(report: Report, path: Path) -> None:
    """Write the PNG of a report."""
    c = report.circumstances
    sizes = f"hidden {c['hidden']}, {c['layers']} layers, sequence {c['seq_len']}, vocabulary {c['vocab_size']}"
    title = f"{sizes}, batch {c['batch_size']}, {c['dtype']}; {c['device']}, torch {c['torch_version']}"
    figure, ((left, right),) = subplots(1, 2, (12.5, 4.6), title)
    draw_contenders(left, report)
    if report.ours.parts:
        draw_waterfall(right, report)
    else:
        right.set_axis_off()
    figure.savefig(path, dpi=DPI)


def draw_contenders(axis: Axes, report: Report) -> None:
    """Draw bars of tokens/s with p10 to p90, and a line at what the matrix products alone would allow."""
    rows = [report.row(result) for result in reversed(report.results)]
    tokens = report.bench.tokens
    for i, row in enumerate(rows):
        axis.barh(
            i, row["tokens_per_s"], color=FLOOR if row["name"] in OF_THIS_PACKAGE + ON_CUDA else OTHER, height=0.6
        )
        axis.plot([tokens / row["seconds_p90"], tokens / row["seconds_p10"]], [i, i], color="black", linewidth=1.5)
        axis.text(0, i + 0.33, f" {row['tokens_per_s']:,.0f}", va="bottom", fontsize=8)
    axis.axvline(tokens / report.gemm_s, color="black", linestyle="--", linewidth=1, label="matrix products alone")
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set(xlabel="tokens/s (line: p10 to p90)")
    axis.set_title("whole steps", fontsize=10)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), fontsize=8)


def draw_waterfall(axis: Axes, report: Report) -> None:
    """Draw microseconds per token, part by part from the left, each with its floor and what lies above it."""
    measured, least = report.parts(report.ours), report.floors()
    total, begin = sum(measured.values()), 0.0
    bars = [(part, us, least[part]) for part, us in measured.items()]
    for i, (part, us, floor) in enumerate([*bars, ("all", total, sum(least.values()))]):
        begin = 0.0 if part == "all" else begin
        low = min(us, floor)
        axis.barh(i, low, left=begin, color=FLOOR, height=0.6, label=None if i else "floor")
        axis.barh(i, us - low, left=begin + low, color=MEASURED, height=0.6, label=None if i else "above it")
        # Text lies inside a wide bar, else beside the bar on the side where there is room.
        is_wide = us > 0.4 * total
        if is_wide:
            x, side = begin, "left"
        elif begin + us < 0.6 * total:
            x, side = begin + us, "left"
        else:
            x, side = begin, "right"
        text = f" {us:,.2f} (floor {floor:,.2f}) "
        axis.text(x, i, text, va="center", ha=side, fontsize=8, color="white" if is_wide else "black")
        begin += us
    axis.set_yticks(range(len(bars) + 1), [*measured, "all"])
    axis.set(xlim=(0, 1.02 * total), xlabel="microseconds per token")
    axis.set_title(f"where a step of {report.ours.name} goes, over the roofline", fontsize=10)
    axis.invert_yaxis()
    axis.legend(loc="lower left", bbox_to_anchor=(0.0, 0.2), fontsize=8)


def draw_scaling(frame: pd.DataFrame, line: ScalingLine | None, kind: str, path: Path) -> None:
    """Write the PNG of --scale: microseconds per token over the size, the fit, and the operations at the GEMM rate."""
    first = frame.iloc[0]
    x = frame[AXIS[kind]].to_numpy(float)
    figure, ((axis,),) = subplots(1, 1, (7, 4.4))
    if "us_per_token" in frame:
        axis.plot(x, frame.us_per_token, "o", color=POINT, label=f"{first.contender}, measured")
    if line is not None:
        axis.plot(x, line.base + line.slope * x, color=MEASURED, label=line.in_words(kind))
    axis.plot(x, frame.gemm_us_per_token, "--", color=FLOOR, label="the model's operations at the GEMM rate")
    axis.set(xlabel=AXIS[kind], ylabel="microseconds per token", ylim=(0, None))
    axis.set_title(f"hidden {first.hidden}, {first['dtype']}, {first.device}, torch {first.torch_version}", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=DPI)
