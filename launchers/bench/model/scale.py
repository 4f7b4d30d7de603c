"""`gptscale bench model --scale seq|layers`: how the time of a token grows with the sequence, or with the layers.

Every point trains the same number of tokens per step, in a process of its own. A straight line is fitted to the time per token:
what grows with the sequence is attention alone, what grows with the layers is everything but tables, head and loss.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.process.task import run_worker
from gptscale.common.settings.checks import refuse_changed
from gptscale.launchers.bench.model.ceilings import step_flops, step_seconds
from gptscale.launchers.bench.model.command import CEILINGS, WARMUP_STEPS, WORKER, Bench, ModelBenchOptions, tell
from gptscale.results.record.files import replace_file

SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192)
LAYERS = (2, 4, 8, 16, 32, 64, 96)


class Line(NamedTuple):
    """Microseconds per token = base + slope x; worst: the largest relative distance of a point from it."""

    base: float
    slope: float
    worst: float


def scale(options: ModelBenchOptions, bench: Bench, command: str) -> int:
    """Measure all points, fit, print, write."""
    if options.floors is not None:
        raise ConfigError("a scaling table has no floors", "in --floors", "leave it out")
    own = ("rounds", "seq_len" if options.scale == "seq" else "layers")
    refuse_changed(options, own, f"--scale {options.scale} has its own, a turn at each size")
    name = options.contenders
    if "," in name:
        raise ConfigError("a scaling table is of one contender", "in --contenders", f"use {name.split(',')[0]}")
    warmup_steps = WARMUP_STEPS if name.endswith("compiled") or bench.device == "cuda" else 1
    plan = points(options, dataclasses.replace(bench, warmup_steps=warmup_steps))
    ceilings = run_worker(WORKER, plan[0].task(CEILINGS))["products"]
    rows = []
    for point in plan:
        tell(f"{name}: sequence {point.gpt.block_size}, {point.gpt.n_layer} layers, batch {point.batch_size}")
        rows.append(row(point, name, run_worker(WORKER, point.task(name)), ceilings))
        frame = pd.DataFrame(rows).assign(
            device=device_name(torch.device(bench.device)), torch_version=torch.__version__, command=command
        )
        if options.csv:
            replace_file(options.csv, frame.to_csv(index=False).encode())
    line = fit(frame, options.scale)
    show(frame, line, options.scale)
    if options.csv:
        print(f"wrote {options.csv}")
    if options.png:
        draw(frame, line, options.scale, options.png)
        print(f"wrote {options.png}")
    return 0


def points(options: ModelBenchOptions, bench: Bench) -> list[Bench]:
    """The shapes to measure; with --scale seq a step has --batch-size sequences (default 1, on CUDA 4) of the longest."""
    if options.scale == "layers":
        return [dataclasses.replace(bench, gpt=dataclasses.replace(bench.gpt, n_layer=n)) for n in LAYERS]
    tokens = SEQ_LENS[-1] * (options.batch_size or (4 if bench.device == "cuda" else 1))
    return [
        dataclasses.replace(bench, gpt=dataclasses.replace(bench.gpt, block_size=n), batch_size=tokens // n)
        for n in SEQ_LENS
    ]


def row(point: Bench, name: str, result: dict[str, Any], ceilings: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One point's figures; times empty if it ran out of memory. gemm_us_per_token: at the rate of the products alone."""
    gpt = point.gpt
    gemm_s, flops = step_seconds(gpt, point.tokens, ceilings), step_flops(gpt, point.tokens)
    per_token = model_flops_per_token(gpt, gpt.block_size)
    found = {
        "contender": name,
        "seq_len": gpt.block_size,
        "layers": gpt.n_layer,
        "hidden": gpt.n_embd,
        "heads": gpt.n_head,
        "vocab_size": gpt.vocab_size,
        "batch_size": point.batch_size,
        "dtype": point.precision,
        "threads": point.threads,
        "status": result["status"],
        "gflop_per_token": per_token / 1e9,
        "gemm_us_per_token": per_token / (flops / gemm_s) * 1e6,
    }
    if result["status"] == "oom":
        return found
    seconds = statistics.median(result["step_times_s"])
    found |= {"step_time_s_median": seconds, "step_time_s_min": min(result["step_times_s"])}
    found |= {"step_time_s_max": max(result["step_times_s"]), "peak_gib": result["peak_gib"]}
    return found | {"tokens_per_s": point.tokens / seconds, "us_per_token": seconds / point.tokens * 1e6}


def fit(frame: pd.DataFrame, kind: str) -> Line | None:
    """The straight line nearest to the points that ran, by relative distance; None for fewer than three."""
    ran = frame[frame.status == "ok"]
    if len(ran) < 3:
        return None
    x, y = ran[_axis(kind)].to_numpy(float), ran.us_per_token.to_numpy(float)
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    return Line(float(base), float(slope), float(np.abs((base + slope * x) / y - 1).max()))


def _axis(kind: str) -> str:
    return {"seq": "seq_len", "layers": "layers"}[kind]


def show(frame: pd.DataFrame, line: Line | None, kind: str) -> None:
    """The table and the fit."""
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    first = frame.iloc[0]
    console.print(
        f"{first.device}, torch {first.torch_version}, {first.threads} threads, {first['dtype']}, {first.contender}"
    )
    console.print(
        f"hidden {first.hidden}, {first.heads} heads, vocabulary {first.vocab_size}, the same tokens per step"
    )
    titles = (_axis(kind), "batch", "tokens/s", "us/token", "at the GEMM rate", "of GEMM rate", "peak GiB")
    table = Table(*titles, box=None, pad_edge=False)
    for point in frame.to_dict("records"):
        cells = [str(point[_axis(kind)]), str(point["batch_size"])]
        if point["status"] == "ok":
            cells += [
                f"{point['tokens_per_s']:,.0f}",
                f"{point['us_per_token']:,.2f}",
                f"{point['gemm_us_per_token']:,.2f}",
            ]
            cells += [f"{point['gemm_us_per_token'] / point['us_per_token']:.1%}", f"{point['peak_gib']:.2f}"]
        else:
            cells += ["out of memory"]
        table.add_row(*cells)
    console.print(table)
    if line is not None:
        console.print(f"us per token = {told(line, kind)}; no point is further from it than {line.worst:.1%}")
        x, y = frame[_axis(kind)].to_numpy(float), frame.gemm_us_per_token.to_numpy(float)
        slope, base = np.polyfit(x, y, 1)
        console.print(f"at the GEMM rate it would be {told(Line(float(base), float(slope), 0.0), kind)}")


def told(line: Line, kind: str) -> str:
    """The line in words."""
    if kind == "seq":
        return f"{line.base:,.2f} + {line.slope * 1024:,.3f} per 1024 positions"
    return f"{line.base:,.2f} + {line.slope:,.3f} per layer"


def draw(frame: pd.DataFrame, line: Line | None, kind: str, path: Path) -> None:
    """Microseconds per token over the size, the fit, and what the operations would take at the rate of the products."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axis_name, first = _axis(kind), frame.iloc[0]
    x = frame[axis_name].to_numpy(float)
    figure, axis = plt.subplots(figsize=(7, 4.4), constrained_layout=True)
    if "us_per_token" in frame:
        axis.plot(x, frame.us_per_token, "o", color="#D55E00", label=f"{first.contender}, measured")
    if line is not None:
        axis.plot(x, line.base + line.slope * x, color="#E69F00", label=told(line, kind))
    axis.plot(x, frame.gemm_us_per_token, "--", color="#0072B2", label="the model's operations at the GEMM rate")
    axis.set(xlabel=axis_name, ylabel="microseconds per token", ylim=(0, None))
    axis.set_title(f"hidden {first.hidden}, {first['dtype']}, {first.device}, torch {first.torch_version}", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
