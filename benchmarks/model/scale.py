"""The figures of `python -m benchmarks.model --scale`: how the time of a token grows with the sequence or the layers.

Every point trains the same number of tokens per step, in a process of its own. A straight line is fitted to the time per token:
what grows with the sequence is attention alone, what grows with the layers is everything but tables, head and loss.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from benchmarks.measurement import or_dash
from benchmarks.model.ceilings import step_flops, step_seconds
from benchmarks.model.options import WARMUP_STEPS, Bench, ModelBenchOptions
from gptscale.common.errors import ConfigError
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.settings.checks import refuse_changed

SEQ_LENS = (256, 512, 1024, 2048, 4096, 8192)
LAYERS = (2, 4, 8, 16, 32, 64, 96)
# The column that grows, by --scale.
AXIS = {"seq": "seq_len", "layers": "layers"}


class ScalingLine(NamedTuple):
    """A straight line of microseconds per token = base + slope x.

    worst: the largest relative distance of a point from it.
    """

    base: float
    slope: float
    worst: float

    def in_words(self, kind: str) -> str:
        """Return the line as text."""
        if kind == "seq":
            return f"{self.base:,.2f} + {self.slope * 1024:,.3f} per 1024 positions"
        return f"{self.base:,.2f} + {self.slope:,.3f} per layer"


def check_scale(options: ModelBenchOptions) -> None:
    """Raise ConfigError for options that mean nothing beside --scale."""
    if options.floors is not None:
        raise ConfigError("a scaling table has no floors", "in --floors", "leave it out")
    ignored = ("rounds", "seq_len" if options.scale == "seq" else "layers")
    refuse_changed(options, ignored, f"--scale {options.scale} has its own, a turn at each size")
    name = options.contenders
    if "," in name:
        raise ConfigError("a scaling table is of one contender", "in --contenders", f"use {name.split(',')[0]}")


def points(options: ModelBenchOptions, bench: Bench) -> list[Bench]:
    """Return the shapes to measure.

    With --scale seq a step has as many tokens as --batch-size sequences (default 1, on CUDA 4) of the longest.
    """
    warmup_steps = WARMUP_STEPS if options.contenders.endswith("compiled") or bench.device == "cuda" else 1
    bench = dataclasses.replace(bench, warmup_steps=warmup_steps)
    if options.scale == "layers":
        return [dataclasses.replace(bench, gpt=dataclasses.replace(bench.gpt, n_layer=n)) for n in LAYERS]
    tokens = SEQ_LENS[-1] * (options.batch_size or (4 if bench.device == "cuda" else 1))
    return [
        dataclasses.replace(bench, gpt=dataclasses.replace(bench.gpt, block_size=n), batch_size=tokens // n)
        for n in SEQ_LENS
    ]


def point_row(point: Bench, name: str, turn: dict[str, Any], ceilings: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return one point's figures, without times if it ran out of memory.

    gemm_us_per_token: microseconds of the model's operations at the rate of the products alone.
    """
    gpt = point.gpt
    gemm_s, flops = step_seconds(gpt, point.tokens, ceilings), step_flops(gpt, point.tokens)
    per_token = model_flops_per_token(gpt, gpt.block_size)
    row = {
        "contender": name,
        "seq_len": gpt.block_size,
        "layers": gpt.n_layer,
        "hidden": gpt.n_embd,
        "heads": gpt.n_head,
        "vocab_size": gpt.vocab_size,
        "batch_size": point.batch_size,
        "dtype": point.precision,
        "threads": point.threads,
        "status": turn["status"],
        "gflop_per_token": per_token / 1e9,
        "gemm_us_per_token": per_token / (flops / gemm_s) * 1e6,
    }
    if turn["status"] == "oom":
        return row
    step_s = statistics.median(turn["step_times_s"])
    row |= {"step_time_s_median": step_s, "step_time_s_min": min(turn["step_times_s"])}
    row |= {"step_time_s_max": max(turn["step_times_s"]), "peak_gib": turn["peak_gib"]}
    return row | {"tokens_per_s": point.tokens / step_s, "us_per_token": step_s / point.tokens * 1e6}


def fit(frame: pd.DataFrame, kind: str) -> ScalingLine | None:
    """Return the straight line nearest to the points that ran, by relative distance, or None for fewer than three."""
    ran = frame[frame.status == "ok"]
    if len(ran) < 3:
        return None
    x, y = ran[AXIS[kind]].to_numpy(float), ran.us_per_token.to_numpy(float)
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    return ScalingLine(float(base), float(slope), float(np.abs((base + slope * x) / y - 1).max()))


def fit_gemm(frame: pd.DataFrame, kind: str) -> ScalingLine:
    """Return the straight line through the times at the GEMM rate, which lie on one."""
    x, y = frame[AXIS[kind]].to_numpy(float), frame.gemm_us_per_token.to_numpy(float)
    slope, base = np.polyfit(x, y, 1)
    return ScalingLine(float(base), float(slope), 0.0)


def point_cells(point: dict[Any, Any], kind: str) -> list[str]:
    """Return the line of a point: size, batch, tokens/s, us/token, at the GEMM rate, of the GEMM rate, peak GiB."""
    cells = [str(point[AXIS[kind]]), str(point["batch_size"])]
    if point["status"] != "ok":
        return [*cells, "out of memory"]
    us, gemm_us = point["us_per_token"], point["gemm_us_per_token"]
    figures = [(point["tokens_per_s"], ",.0f"), (us, ",.2f"), (gemm_us, ",.2f"), (gemm_us / us, ".1%")]
    return cells + [or_dash(value, form) for value, form in [*figures, (point["peak_gib"], ".2f")]]
