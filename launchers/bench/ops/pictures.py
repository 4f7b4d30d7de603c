"""The pictures of `gptscale bench ops`: bandwidth over size, bandwidth by case, and a roofline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd


def draw(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """A picture for each kind of operator in the figures; the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, tuple[tuple[str, ...], Callable[[pd.DataFrame, Any], Any]]] = {
        "gelu.png": (("gelu", "bias_gelu"), over_size),
        "max_pool.png": (("max_pool2d",), by_case),
        "conv_bias_relu.png": (("conv_bias_relu",), roofline),
    }
    written = []
    for name, (operators, picture) in kinds.items():
        part = frame[frame.operator.isin(operators)]
        if not part.empty:
            figure = picture(part, plt)
            figure.savefig(folder / name, dpi=100)
            plt.close(figure)
            written.append(folder / name)
    return written


def over_size(frame: pd.DataFrame, plt: Any) -> Any:
    """Bytes per second over size, a panel per direction, type and number of threads; copying is the roof."""
    rows = frame[["dtype", "threads"]].drop_duplicates().itertuples(index=False)
    panels = [(dtype, threads, way) for dtype, threads in rows for way in ("forward", "backward")]
    figure, axes = plt.subplots(-(-len(panels) // 2), 2, figsize=(11, 3.2 * (-(-len(panels) // 2))), squeeze=False)
    for axis, (dtype, threads, way) in zip(axes.flat, panels, strict=False):
        part = frame[(frame.dtype == dtype) & (frame.threads == threads) & frame.what.str.endswith(way)]
        roof = part.groupby("size_kib").copy_gb_per_s.median()
        axis.plot(roof.index, roof.values, color="black", linewidth=2, label="copy")
        for i, (key, lines) in enumerate(part.groupby(["operator", "what"], sort=False)):
            name = f"{key[0]} {key[1].removesuffix(' ' + way)}"
            axis.plot(lines.size_kib, lines.ours_gb_per_s, color=f"C{i}", marker=".", label=name)
            axis.plot(lines.size_kib, lines.torch_gb_per_s, color=f"C{i}", linestyle=":")
        labels = {"xlabel": "KiB of input", "ylabel": "GB/s", "title": f"{way}, {dtype}, {threads} thread(s)"}
        axis.set(xscale="log", yscale="log", **labels)
        axis.grid(alpha=0.3)
    lines, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=len(names), fontsize=8, title="dotted: PyTorch's own")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def by_case(frame: pd.DataFrame, plt: Any) -> Any:
    """Bytes per second of ours, of PyTorch's and of copying as much, a line per window and layout, a point per size."""
    panels = list(frame[["dtype", "threads"]].drop_duplicates().itertuples(index=False))
    whats = list(dict.fromkeys(frame.what))
    figure, axes = plt.subplots(1, len(panels), figsize=(2 + 3.6 * len(panels), 1 + 0.32 * len(whats)), squeeze=False)
    contenders = (("copy", "copy_gb_per_s", "black", "|"), ("PyTorch", "torch_gb_per_s", "C1", "o"))
    for axis, (dtype, threads) in zip(axes[0], panels, strict=True):
        part = frame[(frame.dtype == dtype) & (frame.threads == threads)]
        for i, (name, column, colour, marker) in enumerate((*contenders, ("ours", "ours_gb_per_s", "C0", "o"))):
            places = [whats.index(what) + (i - 1) * 0.2 for what in part.what]
            axis.scatter(part[column], places, color=colour, marker=marker, s=14, label=name)
        axis.set(xscale="log", xlabel="GB/s", title=f"{dtype}, {threads} thread(s)")
        axis.set_yticks(range(len(whats)), whats if axis is axes[0][0] else [""] * len(whats), fontsize=8)
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower left", fontsize=8)
    figure.tight_layout()
    return figure


def roofline(frame: pd.DataFrame, plt: Any) -> Any:
    """Operations per second over operations per byte (Williams et al. 2009); the roof is copying, then a matrix product."""
    panels = list(frame[["dtype", "threads"]].drop_duplicates().itertuples(index=False))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False)
    for axis, (dtype, threads) in zip(axes[0], panels, strict=True):
        part = frame[(frame.dtype == dtype) & (frame.threads == threads)]
        intensity = part.flops / part.bytes
        slope, peak = part.copy_gb_per_s.median(), part.matmul_gflop_per_s.iloc[0]
        ends = [intensity.min() / 2, peak / slope, max(intensity.max() * 2, 2 * peak / slope)]
        axis.plot(ends, [ends[0] * slope, peak, peak], color="black", label="roof")
        for way, marker in (("forward", "o"), ("both", "s")):
            chosen = part.what.str.endswith(way)
            for name, column, colour in (("PyTorch", "torch_us", "C1"), ("ours", "ours_us", "C0")):
                rate = part.flops[chosen] / part[column][chosen] / 1e3
                axis.scatter(intensity[chosen], rate, s=18, marker=marker, color=colour, label=f"{name}, {way}")
        axis.set(xscale="log", yscale="log", xlabel="FLOP per byte", title=f"{dtype}, {threads} thread(s)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("GFLOP/s")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    return figure
