"""`gptscale bench ops`: the package's operators beside PyTorch's own and beside the machine's copy bandwidth, in the same run.

What is compared runs in turn, ours, PyTorch's, copy, ours ..., in one process, and medians over the rounds are taken. Bytes are
those that must move, each once: inputs read, outputs written. Copy is STREAM's: one tensor into another that is there
already, read plus write (McCalpin 1995, "Memory Bandwidth and Machine Balance"). Freed memory is kept for the next call, as
in a training run, so that page faults are in no figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gptscale.common.config import did_you_mean
from gptscale.common.devices import device_name
from gptscale.common.errors import ConfigError
from gptscale.common.host_memory import keep_freed_memory
from gptscale.launchers.options import parse
from gptscale.ops import library
from gptscale.ops.conv import conv_bias_relu
from gptscale.ops.gelu import APPROXIMATE, bias_gelu, gelu
from gptscale.ops.max_pool import max_pool2d_backward, max_pool2d_with_offsets

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KIB = 2**10
SIZES_KIB = [4**k for k in range(10)]  # 1 KiB to 256 MiB
ROUND_S = 0.02  # of one contender at least, so that the clock's grain and a thread's waking do not show
BIAS_COLUMNS = 2048
OPERATORS = ("gelu", "bias_gelu", "max_pool2d", "conv_bias_relu")


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
    rounds: int = 7
    """Turns of each contender."""
    spread: float = 1.0
    """Standard deviation of the inputs; far from 0 the CPU kernels for GELU take a longer way (docs/ops/gelu.md)."""
    device: str = "cpu"
    """cpu or cuda."""
    csv: Path | None = None
    """File for all figures."""
    png: Path | None = None
    """File for the picture: bandwidth over size."""

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


class Case(NamedTuple):
    """One comparison: `ours` against `theirs`, the same mathematics by PyTorch; both move `bytes` at least.

    bar: what ours must be in multiples of theirs, above 64 KiB; memory_bound: then also 80 % of the copy bandwidth.
    """

    operator: str
    what: str
    dtype: str
    size: int
    bytes: int
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    bar: float
    memory_bound: bool


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
    if options.png:
        draw(frame, options.png)
        print(f"wrote {options.png}")
    return 0


def figures(options: OpsOptions) -> Iterator[dict[str, Any]]:
    """A row per case and number of threads."""
    device, before = torch.device(options.device), torch.get_num_threads()
    console = Console(stderr=True)
    try:
        for threads in map(int, options.threads.split(",")) if device.type == "cpu" else [1]:
            torch.set_num_threads(threads)
            for case in cases(options, device):
                console.print(f"{threads} thread(s): {case.operator} {case.what} {case.dtype} {case.size // KIB} KiB")
                yield measured(case, threads, options.rounds, device)
    finally:
        torch.set_num_threads(before)


def measured(case: Case, threads: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """The medians of one case, and what they mean."""
    source = torch.empty(max(1, case.bytes // 8), device=device).fill_(1.0)
    target = torch.empty_like(source)
    contenders = (case.ours, case.theirs, lambda: target.copy_(source))
    calls = [max(1, int(ROUND_S / max(timed(f, 1, device), 1e-7))) for f in contenders for _ in [timed(f, 2, device)]]
    times = [[timed(f, n, device) for f, n in zip(contenders, calls, strict=True)] for _ in range(rounds)]
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


def cases(options: OpsOptions, device: torch.device) -> Iterator[Case]:
    """All comparisons asked for, one at a time: the largest would not fit in memory together."""
    chosen = options.names()
    for dtype in options.dtypes.split(","):
        for kib in (k for k in SIZES_KIB if k <= options.largest_kib):
            if "gelu" in chosen:
                yield from gelu_cases(kib * KIB, dtype, options.spread, device)
            if "bias_gelu" in chosen:
                yield from bias_gelu_cases(kib * KIB, dtype, options.spread, device)
    if "max_pool2d" in chosen:
        yield from max_pool_cases(options.dtypes.split(","), device)
    if "conv_bias_relu" in chosen:
        yield from conv_cases(options.dtypes.split(","), device)


def torchs_gelu(x: Tensor, variant: str) -> Tensor:
    """PyTorch's own: for sigmoid, which it has no operator for, F.gelu, the fastest a user would take instead."""
    return F.gelu(x, approximate="tanh" if variant == "tanh" else "none")


def torchs_gelu_backward(grad: Tensor, x: Tensor, variant: str) -> Tensor:
    """Its derivative."""
    found: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh" if variant == "tanh" else "none")
    return found


def gelu_cases(size: int, dtype: str, spread: float, device: torch.device) -> Iterator[Case]:
    """Each variant, forward and backward."""
    x = (torch.randn(size // DTYPES[dtype].itemsize, device=device) * spread).to(DTYPES[dtype])
    grad = torch.randn_like(x)
    ours = torch.ops.gptscale.gelu_backward
    for v in APPROXIMATE:
        forward = (lambda v=v: gelu(x, v)), (lambda v=v: torchs_gelu(x, v))
        yield Case("gelu", f"{v} forward", dtype, size, 2 * size, *forward, 1.0, True)
        backward = (lambda v=v: ours(grad, x, v)), (lambda v=v: torchs_gelu_backward(grad, x, v))
        yield Case("gelu", f"{v} backward", dtype, size, 3 * size, *backward, 1.0, True)


def bias_gelu_cases(size: int, dtype: str, spread: float, device: torch.device) -> Iterator[Case]:
    """Fused, against adding and then GELU; backward with the bias gradient, against GELU's and a sum."""
    columns = min(BIAS_COLUMNS, size // DTYPES[dtype].itemsize)
    x = (torch.randn(size // DTYPES[dtype].itemsize, device=device) * spread).to(DTYPES[dtype]).view(-1, columns)
    grad, bias = torch.randn_like(x), torch.randn(columns, device=device).to(DTYPES[dtype])
    summed = x + bias  # what the eager form has kept
    ours = torch.ops.gptscale.bias_gelu_backward
    for v in ("erf", "tanh"):
        forward = (lambda v=v: bias_gelu(x, bias, v)), (lambda v=v: torchs_gelu(x + bias, v))
        yield Case("bias_gelu", f"{v} forward", dtype, size, 2 * size, *forward, 1.3, True)
        backward = (lambda v=v: ours(grad, x, bias, v)), (lambda v=v: torchs_gelu_backward(grad, summed, v).sum(0))
        yield Case("bias_gelu", f"{v} backward", dtype, size, 3 * size, *backward, 1.3, True)


# (batch, channels, height, width), as in LeNet, in a CIFAR net, in ResNet's stem, and a large one
POOLED = ((32, 6, 28, 28), (32, 64, 32, 32), (8, 64, 112, 112), (32, 64, 112, 112))
WINDOWS = ((2, 2, 0), (3, 2, 1), (3, 1, 1))  # size, stride, padding


def max_pool_cases(dtypes: Sequence[str], device: torch.device) -> Iterator[Case]:
    """Forward and backward: PyTorch's keep 8 bytes a window for the place of its maximum, ours 1."""
    aten = torch.ops.aten
    for dtype in dtypes:
        for shape in POOLED:
            for layout in (torch.contiguous_format, torch.channels_last):
                for size, stride, padding in WINDOWS:
                    x = torch.randn(shape, device=device).to(DTYPES[dtype]).to(memory_format=layout)
                    geometry = (size, size), (stride, stride), (padding, padding), (1, 1)
                    y, offsets = max_pool2d_with_offsets(x, *geometry)
                    _, indices = aten.max_pool2d_with_indices(x, *geometry)
                    grad = torch.randn_like(y)
                    what = f"{size}x{size}/{stride} {'NHWC' if layout is torch.channels_last else 'NCHW'}"
                    moved = x.nbytes + y.nbytes + offsets.nbytes
                    forward = (
                        partial(max_pool2d_with_offsets, x, *geometry),
                        partial(aten.max_pool2d_with_indices, x, *geometry),
                    )
                    yield Case("max_pool2d", f"{what} forward", dtype, x.nbytes, moved, *forward, 1.0, False)
                    backward = (
                        partial(max_pool2d_backward, grad, offsets, x.shape, *geometry),
                        partial(aten.max_pool2d_with_indices_backward, grad, x, *geometry, False, indices),
                    )
                    yield Case("max_pool2d", f"{what} backward", dtype, x.nbytes, moved, *backward, 1.0, False)


# (batch, in, size, out, kernel, stride, padding, groups): LeNet's two, a CIFAR net's, a strided, a depthwise
CONVOLVED = (
    (32, 1, 28, 6, 5, 1, 2, 1),
    (32, 6, 14, 16, 5, 1, 0, 1),
    (32, 3, 32, 64, 3, 1, 1, 1),
    (32, 64, 32, 64, 3, 1, 1, 1),
    (8, 64, 56, 128, 3, 2, 1, 1),
    (8, 64, 56, 64, 3, 1, 1, 64),
)


def conv_cases(dtypes: Sequence[str], device: torch.device) -> Iterator[Case]:
    """Forward, and forward with backward, against F.relu(F.conv2d(...))."""
    for dtype in dtypes:
        for batch, channels, size, out, kernel, stride, padding, groups in CONVOLVED:
            x = torch.randn(batch, channels, size, size, device=device).to(DTYPES[dtype]).requires_grad_()
            weight = torch.randn(out, channels // groups, kernel, kernel, device=device).mul_(0.1).to(DTYPES[dtype])
            weight.requires_grad_()
            bias = torch.randn(out, device=device).to(DTYPES[dtype]).requires_grad_()
            eager = partial(F.conv2d, x, weight, bias, stride, padding, 1, groups)
            ours = partial(conv_bias_relu, x, weight, bias, stride, padding, 1, groups)
            both = partial(_both, ours, (x, weight, bias)), partial(_both, partial(_relu, eager), (x, weight, bias))
            forward = torch.no_grad()(ours), torch.no_grad()(partial(_relu, eager))
            what = f"{channels}x{size}x{size} to {out}, {kernel}x{kernel}/{stride}" + (
                f", {groups} groups" * (groups > 1)
            )
            moved = x.nbytes + weight.nbytes + bias.nbytes + forward[0]().nbytes
            yield Case("conv_bias_relu", f"{what} forward", dtype, x.nbytes, moved, *forward, 1.0, False)
            yield Case("conv_bias_relu", f"{what} both", dtype, x.nbytes, 3 * moved, *both, 1.0, False)


def _relu(convolved: Callable[[], Tensor]) -> Tensor:
    return F.relu(convolved())


def _both(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y = forward()
    return torch.autograd.grad(y, leaves, torch.ones_like(y))


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


def draw(frame: pd.DataFrame, path: Path) -> None:
    """Bytes per second over size, a panel per direction, type and number of threads; copying is the roof."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    frame = frame[frame.operator.isin(["gelu", "bias_gelu"])]
    if frame.empty:
        raise ConfigError("only gelu and bias_gelu have sizes to draw", "in --png", "add one of them to --operators")
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
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="KiB of input",
            ylabel="GB/s",
            title=f"{way}, {dtype}, {threads} thread(s)",
        )
        axis.grid(alpha=0.3)
    lines, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=len(names), fontsize=8, title="dotted: PyTorch's own")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
