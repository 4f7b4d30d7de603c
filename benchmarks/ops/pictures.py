"""The pictures of `python -m benchmarks.ops`: bandwidth over size, bandwidth by case, and a roofline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from gptscale.results.render import DPI, subplots


def draw(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Draw a picture for each kind of operator in the figures, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, tuple[tuple[str, ...], Callable[[pd.DataFrame], Figure]]] = {
        "gelu.png": (("gelu", "bias_gelu"), over_size),
        "max_pool.png": (("max_pool2d",), by_case),
        "conv_bias_relu.png": (("conv_bias_relu",), roofline),
    }
    files = []
    for name, (operators, picture) in kinds.items():
        rows = frame[frame.operator.isin(operators)]
        if not rows.empty:
            picture(rows).savefig(folder / name, dpi=DPI)
            files.append(folder / name)
    return files


def over_size(frame: pd.DataFrame) -> Figure:
    """Draw bytes per second over size, under the roof of copying, a panel per direction, type and threads."""
    runs = frame[["dtype", "threads"]].drop_duplicates().itertuples(index=False)
    panels = [(dtype, threads, way) for dtype, threads in runs for way in ("forward", "backward")]
    n_rows = -(-len(panels) // 2)
    figure, axes = subplots(n_rows, 2, (11, 3.2 * n_rows))
    for axis, (dtype, threads, way) in zip(axes.flat, panels, strict=False):
        rows = frame[(frame.dtype == dtype) & (frame.threads == threads) & frame.what.str.endswith(way)]
        roof = rows.groupby("size_kib").copy_gb_per_s.median()
        axis.plot(roof.index, roof.values, color="black", linewidth=2, label="copy")
        for i, (key, lines) in enumerate(rows.groupby(["operator", "what"], sort=False)):
            name = f"{key[0]} {key[1].removesuffix(' ' + way)}"
            axis.plot(lines.size_kib, lines.ours_gb_per_s, color=f"C{i}", marker=".", label=name)
            axis.plot(lines.size_kib, lines.torch_gb_per_s, color=f"C{i}", linestyle=":")
        labels = {"xlabel": "KiB of input", "ylabel": "GB/s", "title": f"{way}, {dtype}, {threads} thread(s)"}
        axis.set(xscale="log", yscale="log", **labels)
        axis.grid(alpha=0.3)
    handles, names = axes.flat[0].get_legend_handles_labels()
    title = "dotted: PyTorch's own"
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8, title=title)
    return figure


def by_case(frame: pd.DataFrame) -> Figure:
    """Draw bytes per second of ours, of PyTorch's and of copying as much, a line per window and layout, a point per size."""
    panels = list(frame[["dtype", "threads"]].drop_duplicates().itertuples(index=False))
    whats = list(dict.fromkeys(frame.what))
    figure, axes = subplots(1, len(panels), (2 + 3.6 * len(panels), 1 + 0.32 * len(whats)))
    contenders = (
        ("copy", "copy_gb_per_s", "black", "|"),
        ("PyTorch", "torch_gb_per_s", "C1", "o"),
        ("ours", "ours_gb_per_s", "C0", "o"),
    )
    for axis, (dtype, threads) in zip(axes[0], panels, strict=True):
        rows = frame[(frame.dtype == dtype) & (frame.threads == threads)]
        for i, (name, column, colour, marker) in enumerate(contenders):
            heights = [whats.index(what) + (i - 1) * 0.2 for what in rows.what]
            axis.scatter(rows[column], heights, color=colour, marker=marker, s=14, label=name)
        axis.set(xscale="log", xlabel="GB/s", title=f"{dtype}, {threads} thread(s)")
        axis.set_yticks(range(len(whats)), whats if axis is axes[0][0] else [""] * len(whats), fontsize=8)
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", fontsize=8, ncols=len(names))
    return figure


def roofline(frame: pd.DataFrame) -> Figure:
    """Draw operations per second over operations per byte (Williams et al. 2009).

    The roof is copying, then the fastest rate that a product or an operator reached, since one product may meet a busy moment.
    """
    panels = list(frame[["dtype", "threads"]].drop_duplicates().itertuples(index=False))
    figure, axes = subplots(1, len(panels), (4.2 * len(panels), 4))
    for axis, (dtype, threads) in zip(axes[0], panels, strict=True):
        rows = frame[(frame.dtype == dtype) & (frame.threads == threads)]
        intensity = rows.flops / rows.bytes
        reached = (rows.flops / rows[["ours_us", "torch_us"]].min(axis=1)).max() / 1e3
        slope, peak = rows.copy_gb_per_s.max(), max(rows.matmul_gflop_per_s.max(), reached)
        ends = sorted([intensity.min() / 2, peak / slope, max(intensity.max() * 2, 2 * peak / slope)])
        axis.plot(ends, [min(end * slope, peak) for end in ends], color="black", label="roof")
        for way, marker in (("forward", "o"), ("both", "s")):
            chosen = rows.what.str.endswith(way)
            for name, column, colour in (("PyTorch", "torch_us", "C1"), ("ours", "ours_us", "C0")):
                rate = rows.flops[chosen] / rows[column][chosen] / 1e3
                axis.scatter(intensity[chosen], rate, s=18, marker=marker, color=colour, label=f"{name}, {way}")
        axis.set(xscale="log", yscale="log", xlabel="FLOP per byte", title=f"{dtype}, {threads} thread(s)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GFLOP/s")
    axes[0][0].legend(fontsize=8)
    return figure
