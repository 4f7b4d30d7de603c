"""`gptscale bench ops`: the package's operators beside PyTorch's own and beside the machine's copy bandwidth, in the same run.

What is compared runs in turn, in one process: ours, PyTorch's, copy, and the next round in another order, each turn after a call
that is not timed, so that nobody finds the caches as another left them. Medians over the rounds are taken. Bytes are
those that must move, each once: inputs read, outputs written. Copy is STREAM's: one tensor into another that is there
already, read plus write (McCalpin 1995, "Memory Bandwidth and Machine Balance"). Freed memory is kept for the next call, as
in a training run, so that page faults are in no figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import ConfigError
from gptscale.common.measure.devices import device_name
from gptscale.common.process.begin import keep_freed_memory
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.launchers.bench.ops.cases import DTYPES, KIB, OPERATORS, SIZES_KIB, Case, cases
from gptscale.launchers.bench.ops.pictures import draw
from gptscale.ops import registry as library

ROUND_S = 0.02  # of one contender at least, so that the clock's grain and a thread's waking do not show
ORDERS = ((0, 1, 2), (1, 0, 2))  # of ours, PyTorch's and copying
SQUARE = 1024  # side of the matrices whose product is the roof of arithmetic


@dataclass(frozen=True)
class OpsOptions:
    """Which operators, at which sizes."""

    operators: str = "all"
    """gelu,bias_gelu,max_pool2d,conv_bias_relu, or all."""
    dtypes: str = "fp32,bf16"
    """fp32, bf16, fp16, with commas between."""
    threads: str = "1,2"
    """Numbers of CPU threads; of no account on a GPU."""
    largest_kib: int = SIZES_KIB[-1]
    """Largest input of elementwise operators; sizes are 1 KiB and its quadruples."""
    rounds: int = 8
    """Turns of each contender; an even number has as many turns of either order."""
    spread: float = 1.0
    """Standard deviation of the inputs; far from 0 the CPU kernels for GELU take a longer way (docs/ops/gelu.md)."""
    device: str = "cpu"
    """cpu or cuda."""
    csv: Path | None = None
    """File for all figures."""
    pictures: Path | None = None
    """Folder for the pictures, one for each kind of operator: bandwidth over size, by case, and a roofline."""

    def __post_init__(self) -> None:
        for word in self.names():
            if word not in OPERATORS:
                raise ConfigError(f"unknown operator {word!r}", "in --operators", did_you_mean(word, OPERATORS))
        for word in self.dtypes.split(","):
            if word not in DTYPES:
                raise ConfigError(f"unknown dtype {word!r}", "in --dtypes", did_you_mean(word, DTYPES))
        if not all(word.isdigit() and 1 <= int(word) <= 1024 for word in self.threads.split(",")):
            raise ConfigError(f"bad threads {self.threads!r}", "in --threads", "use numbers like 1,2")
        if not 1 <= self.largest_kib <= 2**22 or not 1 <= self.rounds <= 1000 or not 0 <= self.spread <= 1e4:
            raise ConfigError("a number is out of range", "in --largest-kib, --rounds or --spread", "see --help")
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            raise ConfigError(f"no device {self.device!r} here", "in --device", "use --device cpu")

    def names(self) -> list[str]:
        """The operators chosen."""
        return list(OPERATORS) if self.operators == "all" else self.operators.split(",")


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = parse(OpsOptions, argv, prog="gptscale bench ops", about="Operators beside PyTorch's own, and copying.")
    keep_freed_memory()
    library.ready()
    frame = pd.DataFrame(figures(options))
    show(frame, Console(width=None if Console().is_terminal else 130))
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(options.csv, index=False)
        print(f"wrote {options.csv}")
    if options.pictures:
        for path in draw(frame, options.pictures):
            print(f"wrote {path}")
    return 0


def figures(options: OpsOptions) -> Iterator[dict[str, Any]]:
    """A row per case and number of threads."""
    device, before = torch.device(options.device), torch.get_num_threads()
    console = Console(stderr=True)
    try:
        for threads in map(int, options.threads.split(",")) if device.type == "cpu" else [1]:
            torch.set_num_threads(threads)
            dtypes = options.dtypes.split(",")
            peaks = {dtype: matmul_rate(DTYPES[dtype], device) for dtype in dtypes}
            for case in cases(options.names(), dtypes, options.largest_kib, options.spread, device):
                console.print(f"{threads} thread(s): {case.operator} {case.what} {case.dtype} {case.size // KIB} KiB")
                row = measured(case, threads, options.rounds, device)
                yield row | {"flops": case.flops, "bytes": case.bytes, "matmul_gflop_per_s": peaks[case.dtype]}
    finally:
        torch.set_num_threads(before)


def measured(case: Case, threads: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """The medians of one case, and what they mean."""
    source = torch.empty(max(1, case.bytes // 8), device=device).fill_(1.0)
    target = torch.empty_like(source)
    contenders = (case.ours, case.theirs, lambda: target.copy_(source))
    calls = [max(1, int(ROUND_S / max(timed(f, 1, device), 1e-7))) for f in contenders for _ in [timed(f, 2, device)]]
    times = [[0.0] * len(contenders) for _ in range(rounds)]
    for turn, row in enumerate(times):
        for i in ORDERS[turn % len(ORDERS)]:
            timed(contenders[i], 1, device)
            row[i] = timed(contenders[i], calls[i], device)
    ours, theirs, copy = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(t[1] / t[0] for t in times)
    share = statistics.median(t[2] / t[0] for t in times)
    return {
        "operator": case.operator,
        "what": case.what,
        "dtype": case.dtype,
        "device": device_name(device),
        "threads": threads,
        "size_kib": case.size / KIB,
        "ours_us": ours * 1e6,
        "torch_us": theirs * 1e6,
        "ratio_to_torch": ratio,
        "ours_gb_per_s": case.bytes / ours / 1e9,
        "torch_gb_per_s": case.bytes / theirs / 1e9,
        "copy_gb_per_s": source.nbytes * 2 / copy / 1e9,
        "share_of_copy": share,
        "bar_ratio": case.bar,
        "memory_bound": case.memory_bound,
    }


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """GFLOP/s of a square matrix product, median of nine."""
    side = SQUARE if device.type == "cpu" else 8 * SQUARE
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    timed(lambda: a @ b, 2, device)
    return 2 * side**3 / statistics.median(timed(lambda: a @ b, 1, device) for _ in range(9)) / 1e9


def timed(f: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Seconds per call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        f()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / calls


def show(frame: pd.DataFrame, console: Console) -> None:
    """Per operator, dtype and threads: the worst ratio above 64 KiB, and the share of copying's bandwidth at the largest size."""
    table = Table(
        "operator", "what", "dtype", "threads", "PyTorch / ours", "bar", "of copy", box=None, pad_edge=False
    )  # fmt: skip
    for key, rows in frame.groupby(["operator", "what", "dtype", "threads"], sort=False):
        counted = rows[rows.size_kib > 64] if (rows.size_kib > 64).any() else rows
        worst, median = counted.ratio_to_torch.min(), counted.ratio_to_torch.median()
        largest, bar = rows.iloc[-1], rows.bar_ratio.iloc[0]
        colour = "green" if worst >= bar else "yellow" if median >= bar else "red"
        share = f"{largest.share_of_copy:.0%}" if largest.memory_bound else ""
        ratios = f"[{colour}]{worst:.2f}[/] to {counted.ratio_to_torch.max():.2f}, median {median:.2f}"
        table.add_row(*map(str, key), ratios, f"{bar:g}", share)  # type: ignore[arg-type]
    console.print(table)
    console.print("PyTorch / ours: times, over the sizes above 64 KiB; of copy: bytes per second at the largest size")
    copies = frame.sort_values("size_kib").groupby("threads").copy_gb_per_s.last()
    said = ", ".join(f"{threads} thread(s) {rate:.1f} GB/s" for threads, rate in copies.items())
    console.print(f"copy at the largest size: {said}; {frame.device.iloc[0]}, torch {torch.__version__}")
