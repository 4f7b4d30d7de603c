"""`gptscale bench NAME`: measurements against an alternative in the same run, because only ratios travel between machines.

Contenders run in turn, A B A B ..., each in a process of its own (so that one's memory is not the other's peak), and the
median over rounds is compared. launchers/bench/model/loop_contenders.py holds what each of them does.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import tyro
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.measure.flops import model_flops_per_token
from gptscale.common.process.task import run_worker
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.gpt_config import PRESETS, GPTConfig

# The shape at which the exercise's baseline is compared on a CPU: small enough to run, with the real vocabulary.
CPU_SHAPE = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=50257)

BENCHES = {
    "handout": ("handout", "single", "single_compiled", "gemm"),
    "loop": ("bare_loop", "our_loop"),
    "data": ("our_loop",),
}


@dataclass(frozen=True)
class BenchOptions:
    """handout: the exercise's baseline against `single`; loop: a bare loop against ours; data: waiting for tokens."""

    name: tyro.conf.Positional[Literal["handout", "loop", "data"]]
    """What to measure."""
    model: str = "default"
    """Preset; default hidden 384, 6 layers, sequence 256, vocabulary 50257 for handout, tiny for the others."""
    batch_size: int = 8
    """Sequences per step."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """As in gptscale run, where the baseline has it too."""
    steps: int = 8
    """Timed steps of each round."""
    rounds: int = 3
    """Turns of each contender."""
    threads: int = 2
    """CPU threads."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Of every contender."""
    csv: Path | None = None
    """File for the figures."""
    md: Path | None = None
    """File for the table in Markdown."""

    def __post_init__(self) -> None:
        if self.model != "default" and self.model not in PRESETS:
            raise ConfigError(f"unknown model {self.model!r}", "in --model", "use one of: " + " ".join(PRESETS))
        for name in ("batch_size", "steps", "rounds", "threads"):
            if not 1 <= getattr(self, name) <= 10_000:
                raise ConfigError(
                    f"{name} {getattr(self, name)} is out of range", f"in --{name.replace('_', '-')}", "use 1 to 10000"
                )

    def gpt(self) -> GPTConfig:
        if self.model != "default":
            return PRESETS[self.model]
        return CPU_SHAPE if self.name == "handout" else PRESETS["tiny"]


@dataclass
class Measured:
    """One contender over all rounds; times in seconds."""

    contender: str
    step_times_s: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_times_s)


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse(
        BenchOptions, argv, prog="gptscale bench", about="Measurements against an alternative in the same run."
    )
    found = [Measured(name) for name in BENCHES[options.name]]
    for turn in range(options.rounds):
        for measured in found:
            print(f"round {turn + 1} of {options.rounds}: {measured.contender}", file=sys.stderr, flush=True)
            result = run_contender(measured.contender, options)
            measured.step_times_s += result["step_times_s"]
            measured.peak_gib = max(measured.peak_gib, result["peak_gib"])
            measured.details = result["details"]
    frame = figures(found, options)
    show(frame, found, options)
    for path, text in ((options.csv, frame.to_csv(index=False)), (options.md, markdown(frame))):
        if path:
            path.write_text(text)
            print(f"wrote {path}")
    return 0


def run_contender(contender: str, options: BenchOptions) -> dict[str, Any]:
    """One turn of one contender."""
    task = {**asdict(options), "csv": None, "md": None, "gpt": asdict(options.gpt()), "contender": contender}
    return run_worker("gptscale.launchers.bench.model.loop_contenders", task)


def figures(found: list[Measured], options: BenchOptions) -> pd.DataFrame:
    """A row per contender; ratios are to the first one."""
    gpt = options.gpt()
    tokens = options.batch_size * gpt.block_size
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for m in found:
        rows.append(
            {
                "contender": m.contender,
                "step_time_s_median": m.median_s,
                "step_time_s_min": min(m.step_times_s),
                "step_time_s_max": max(m.step_times_s),
                "tokens_per_s": tokens / m.median_s,
                "ratio_to_first": found[0].median_s / m.median_s,
                "tflops": tokens / m.median_s * model_flops_per_token(gpt, gpt.block_size) / 1e12,
                "peak_gib": m.peak_gib,
                "data_wait_fraction": m.details.get("data_wait_fraction"),
                "steps_timed": len(m.step_times_s),
                "device": device_name(device),
                "precision": options.precision,
                "torch_version": torch.__version__,
            }
        )
    return pd.DataFrame(rows)


def show(frame: pd.DataFrame, found: list[Measured], options: BenchOptions) -> None:
    """The table, and for `single` where its time goes."""
    console = Console(width=None if Console().is_terminal else 110)
    gpt = options.gpt()
    sizes = f"hidden {gpt.n_embd}, {gpt.n_layer} layers, {gpt.n_head} heads, sequence {gpt.block_size}"
    console.print(
        f"{frame.device[0]}, torch {torch.__version__}, {options.threads} threads, {options.precision}", highlight=False
    )
    console.print(f"{sizes}, vocabulary {gpt.vocab_size}, batch {options.batch_size}", highlight=False)
    titles = ("contender", "step ms (min-max)", "tokens/s", "vs first", "TFLOP/s", "peak GiB")
    table = Table(*titles, box=None, pad_edge=False)
    row: Any
    for row in frame.itertuples():
        times = (
            f"{row.step_time_s_median * 1e3:,.1f} ({row.step_time_s_min * 1e3:,.1f}-{row.step_time_s_max * 1e3:,.1f})"
        )
        table.add_row(
            str(row.contender),
            times,
            f"{row.tokens_per_s:,.0f}",
            f"{row.ratio_to_first:.3f}x",
            f"{row.tflops:.3f}",
            f"{row.peak_gib:.2f}",
        )
    console.print(table)
    by_name = {m.contender: m for m in found}
    if "gemm" in by_name and "single" in by_name:
        share = by_name["gemm"].median_s / min(by_name[n].median_s for n in ("single", "single_compiled"))
        console.print(
            f"gemm: the step's matrix products alone; the faster `single` reaches {share:.1%} of their rate",
            highlight=False,
        )
    if parts := by_name.get("single", found[-1]).details.get("where_time_goes"):
        console.print(
            "where a step of `single` goes: " + ", ".join(f"{k} {v:.1%}" for k, v in parts.items()), highlight=False
        )
    if (waited := found[-1].details.get("data_wait_fraction")) is not None:
        console.print(f"waiting for data: {waited:.3%} of the step time ({found[-1].details['data']})", highlight=False)


def markdown(frame: pd.DataFrame) -> str:
    """The figures as a Markdown table."""

    def shown(value: Any) -> str:
        return "" if pd.isna(value) else f"{value:.5g}" if isinstance(value, float) else str(value)

    lines = [
        list(frame.columns),
        ["---"] * len(frame.columns),
        *([shown(v) for v in row] for row in frame.itertuples(index=False)),
    ]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
