"""The operators beside PyTorch's own and beside the bandwidth of copying: `python -m benchmarks.ops`.

What is compared runs in turn, in one process: ours, PyTorch's, copy, and the next round in another order. Each turn follows a
call that is not timed, so that no contender finds the caches as another one left them. Medians over the rounds are taken. Bytes
are those that must move, each once: inputs read, outputs written. Copy is STREAM's: one tensor into another that is there
already, read plus write (McCalpin 1995, "Memory Bandwidth and Machine Balance"). Freed memory is kept for the next call, as in
a training run, so that page faults are in no figure.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import collect, print_written, tell
from benchmarks.quiet import QuietOptions, quiet_machine
from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from benchmarks.ops.cases import OperatorCase


@dataclass(frozen=True)
class OpsOptions(QuietOptions):
    """Which operators, at which sizes."""

    operators: str = "all"
    """gelu,bias_gelu,max_pool2d,conv_bias_relu, or all."""
    dtypes: str = "fp32,bf16"
    """fp32, bf16, fp16, with commas between."""
    threads: str = "1,2"
    """Numbers of CPU threads; of no account on a GPU."""
    largest_kib: int = 4**9
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
        import torch

        from benchmarks.ops.cases import DTYPES

        self.names()
        parse_names(self.dtypes, DTYPES, "dtype", "--dtypes")
        if not all(word.isdigit() and 1 <= int(word) <= 1024 for word in self.threads.split(",")):
            raise ConfigError(f"bad threads {self.threads!r}", "in --threads", "use numbers like 1,2")
        if not 1 <= self.largest_kib <= 2**22 or not 1 <= self.rounds <= 1000 or not 0 <= self.spread <= 1e4:
            raise ConfigError("a number is out of range", "in --largest-kib, --rounds or --spread", "see --help")
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            raise ConfigError(f"no device {self.device!r} here", "in --device", "use --device cpu")
        check_output_file(self.csv, "--csv", "cannot be written")
        if self.pictures is not None and self.pictures.exists() and not self.pictures.is_dir():
            raise ConfigError(f"{self.pictures} is no folder", "in --pictures", "name a folder")

    def names(self) -> list[str]:
        """Return the chosen operators."""
        from benchmarks.ops.cases import OPERATORS

        if self.operators == "all":
            return list(OPERATORS)
        return parse_names(self.operators, OPERATORS, "operator", "--operators")


def main(argv: Sequence[str]) -> int:
    """Measure, print, write, and return 0."""
    options = parse(
        OpsOptions, argv, prog="python -m benchmarks.ops", about="Operators beside PyTorch's own, and copying."
    )
    # After the options are parsed, because they import torch and pandas.
    from benchmarks.ops.pictures import draw
    from gptscale.common.process.begin import keep_freed_memory
    from gptscale.ops import registry

    keep_freed_memory()
    registry.ready()
    with quiet_machine(options, "benchmarks.ops"):
        frame = collect(figures(options), options.csv)
        show(frame)
        print_written(options.csv, *(draw(frame, options.pictures) if options.pictures else []))
    return 0


def figures(options: OpsOptions) -> Iterator[dict[str, Any]]:
    """Measure every case with every number of threads, and yield a row for each."""
    import torch

    from benchmarks.nvme import matmul_rate
    from benchmarks.ops.cases import DTYPES, KIB, cases

    device, threads_before = torch.device(options.device), torch.get_num_threads()
    dtypes = options.dtypes.split(",")
    try:
        for threads in map(int, options.threads.split(",")) if device.type == "cpu" else [1]:
            torch.set_num_threads(threads)
            peaks = {dtype: matmul_rate(DTYPES[dtype], device) for dtype in dtypes}
            for case in cases(options.names(), dtypes, options.largest_kib, options.spread, device):
                tell(f"{threads} thread(s): {case.operator} {case.what} {case.dtype} {case.size // KIB} KiB")
                row = measure_case(case, threads, options.rounds, device)
                yield row | {"flops": case.flops, "bytes": case.bytes, "matmul_gflop_per_s": peaks[case.dtype]}
    finally:
        torch.set_num_threads(threads_before)


def measure_case(case: OperatorCase, threads: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the medians of one case, and the rates and ratios that follow from them."""
    from benchmarks.ops.cases import KIB
    from benchmarks.timing import copy_call, rounds_in_changing_order
    from gptscale.common.measure.devices import device_name

    copy, copy_bytes = copy_call(device, case.bytes // 2)
    calls = {"ours": case.ours, "torch": case.torchs, "copy": copy}
    times = list(rounds_in_changing_order(calls, device, rounds))
    ours, torchs, copying = (statistics.median(row[name] for row in times) for name in calls)
    return {
        "operator": case.operator,
        "what": case.what,
        "dtype": case.dtype,
        "device": device_name(device),
        "threads": threads,
        "size_kib": case.size / KIB,
        "ours_us": ours * 1e6,
        "torch_us": torchs * 1e6,
        "ratio_to_torch": statistics.median(row["torch"] / row["ours"] for row in times),
        "ours_gb_per_s": case.bytes / ours / 1e9,
        "torch_gb_per_s": case.bytes / torchs / 1e9,
        "copy_gb_per_s": copy_bytes / copying / 1e9,
        "share_of_copy": statistics.median(row["copy"] / row["ours"] for row in times),
        "bar_ratio": case.bar,
        "memory_bound": case.memory_bound,
    }


def show(frame: pd.DataFrame) -> None:
    """Print the worst ratio above 64 KiB and the share of copying's bandwidth at the largest size.

    There is a line for each operator, dtype and number of threads.
    """
    import torch

    console = render.console(130, markup=True)
    table = render.table(["operator", "what", "dtype", "threads", "PyTorch / ours", "bar", "of copy"])
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
    rates = ", ".join(f"{threads} thread(s) {rate:.1f} GB/s" for threads, rate in copies.items())
    console.print(f"copy at the largest size: {rates}; {frame.device.iloc[0]}, torch {torch.__version__}")


if __name__ == "__main__":
    sys.exit(start(main))
