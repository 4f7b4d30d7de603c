"""The experiment's rows beside those of report B (docs/lenet/README.md): tables, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

from gptscale.lenet.comparison.tables import Lines
from gptscale.lenet.minigrad.training import StepTimes
from gptscale.results.render import DPI, subplots

# The report's seconds per step, with a pooling backward of Python loops and with one in CUDA.
REPORT_LOOP = StepTimes(0.005984, 0.13259, 0.29507, 0.44229)
REPORT_KERNEL = StepTimes(0.005051, 0.000390, 0.000218, 0.011350)
# Colours of Okabe & Ito 2008.
OUR_COLOUR, THEIR_COLOUR = "#D55E00", "#0072B2"


def report_figures() -> pd.DataFrame:
    """Return all 80 rows of the report, 20 epochs of four runs."""
    return pd.read_csv(Path(__file__).with_name("own_autograd_mnist.csv"))


def report_run(model: str, pool_backward: str) -> pd.DataFrame:
    """Return the report's 20 rows for a model, where LeNet has one run with the loop and one with a kernel."""
    if model == "LeNet":
        model = "LeNet_forloop_pool" if pool_backward in ("loop", "windows") else "LeNet_cuda_pool"
    figures = report_figures()
    return figures[figures.model == model].reset_index(drop=True)


def times_lines(loop: StepTimes, kernel: StepTimes, loop_name: str, kernel_name: str) -> Lines:
    """Return the milliseconds of one step by a loop and by a kernel, with the report's figures beside them."""
    titles = (f"{loop_name} ms", f"{kernel_name} ms", "ratio", "their loop ms", "their CUDA ms", "their ratio")
    parts = ("forward", "pool 2 backward", "pool 1 backward", "backward, all")
    lines = []
    for what, *seconds in zip(parts, loop, kernel, REPORT_LOOP, REPORT_KERNEL, strict=True):
        cells = []
        for slow_s, fast_s in (seconds[:2], seconds[2:]):
            cells += [f"{1e3 * slow_s:,.3f}", f"{1e3 * fast_s:,.3f}", f"{slow_s / fast_s:,.1f}x"]
        lines.append({"one step of LeNet": what} | dict(zip(titles, cells, strict=True)))
    return lines


def last_lines(runs: Mapping[str, pd.DataFrame], reported: Mapping[str, pd.DataFrame]) -> Lines:
    """Return the last epoch of each model, and below each that of the report, with the median seconds of an epoch."""
    lines = []
    for name, measured in runs.items():
        pooling = str(measured.pool_backward.iloc[0])
        title = f"{name}, {pooling}" if pooling else name
        lines.append(_last_line(title, measured, measured.epoch_cpu_s.median()))
        if name in reported:
            lines.append(_last_line(f"report B: {reported[name].model.iloc[0]}", reported[name]))
    return lines


def _last_line(title: str, rows: pd.DataFrame, cpu_s: float | None = None) -> dict[str, str]:
    last = rows.iloc[-1]
    line = {"last epoch": title, "train loss": f"{last.train_loss:.4f}", "train error": f"{100 * last.train_err:.3f} %"}
    line |= {"test loss": f"{last.test_loss:.4f}", "test error": f"{100 * last.test_err:.2f} %"}
    line |= {"s per epoch": f"{rows.epoch_time_s.median():.2f}"}
    return line | {"processor s": "-" if cpu_s is None else f"{cpu_s:.2f}"}


def draw(path: Path, runs: Mapping[str, pd.DataFrame], reported: Mapping[str, pd.DataFrame], title: str) -> None:
    """Write a figure with loss above and error below, and a column for each model.

    Training is dashed. The report's curves are drawn where `reported` has the model.
    """
    figure, grid = subplots(2, len(runs), (4.6 * len(runs), 7), title)
    for (name, measured), (above, below) in zip(runs.items(), grid.T, strict=True):
        _curves(above, name, "loss", measured, reported.get(name))
        _curves(below, name, "err", measured, reported.get(name))
    figure.savefig(path, dpi=DPI)


def _curves(axis: Axes, name: str, what: str, measured: pd.DataFrame, reported: pd.DataFrame | None) -> None:
    """Draw one panel, where `what` is loss, in nats, or err, in percent."""
    scale, form, label = (100.0, "{:.2f} %", "error (%)") if what == "err" else (1.0, "{:.3f}", "loss (nats)")
    ends: list[str] = []
    for rows, who, colour in ((reported, "theirs", THEIR_COLOUR), (measured, "ours", OUR_COLOUR)):
        if rows is None:
            continue
        test, train = scale * rows[f"test_{what}"], scale * rows[f"train_{what}"]
        axis.plot(rows.epoch, test, color=colour, label=f"{who}, test")
        # An error of exactly 0 has no place on a logarithmic axis.
        axis.plot(rows.epoch, train.where(train > 0), color=colour, label=f"{who}, training", linestyle="--")
        ends.append(f"{who} {form.format(test.iloc[-1])}")
    title = f"{name}: test {label.split()[0]} at the end {', '.join(ends)}"
    axis.set(title=title, xlabel="epoch", ylabel=label, yscale="log")
    axis.title.set_fontsize(10)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8)
