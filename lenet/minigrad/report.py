"""Our rows beside the old experiment's: as tables, as a CSV with the same columns, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from rich.table import Table

from gptscale.lenet.minigrad.timing import StepTimes

OLD_COLUMNS = ("model", "epoch", "train_loss", "train_err", "test_loss", "test_err", "epoch_time_s")
# Its seconds per step, with a pooling backward of Python loops and with one in CUDA.
OLD_LOOP = StepTimes(0.005984, 0.13259, 0.29507, 0.44229)
OLD_KERNEL = StepTimes(0.005051, 0.000390, 0.000218, 0.011350)
OURS, THEIRS = "#D55E00", "#0072B2"  # Okabe & Ito 2008


def old_figures() -> pd.DataFrame:
    """All 80 rows of the old experiment, 20 epochs of four runs."""
    with files("gptscale.lenet.minigrad").joinpath("own_autograd_mnist.csv").open() as file:
        return pd.read_csv(file)


def old_run(model: str, pool_backward: str) -> pd.DataFrame:
    """The 20 rows of the old run that is repeated; LeNet has one for the loop and one for a kernel."""
    name = model if model != "LeNet" else f"LeNet_{'forloop' if pool_backward == 'loop' else 'cuda'}_pool"
    old = old_figures()
    return old[old.model == name].reset_index(drop=True)


def epochs_table(ours: pd.DataFrame, old: pd.DataFrame | None) -> Table:
    """One line per epoch; each figure of ours with theirs behind it, or ours alone where `old` is None."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("epoch", justify="right")
    for column in OLD_COLUMNS[2:]:
        name = column.removesuffix("_time_s").replace("_", " ") + (" s" if column.endswith("_s") else "")
        table.add_column(name, justify="right")
        if old is not None:
            table.add_column("theirs", justify="right", style="dim")
    by_epoch = {} if old is None else {int(row["epoch"]): row for row in old.to_dict("records")}
    for row in ours.to_dict("records"):
        cells = [str(row["epoch"])]
        for column in OLD_COLUMNS[2:]:
            digits = 2 if column.endswith("_s") else 5
            cells.append(f"{row[column]:.{digits}f}")
            if old is not None:
                other = by_epoch.get(int(row["epoch"]))
                cells.append(f"{other[column]:.{digits}f}" if other is not None else "-")
        table.add_row(*cells)
    return table


TIMED = {
    "forward": "forward_s",
    "pool 2 backward": "pool_2_backward_s",
    "pool 1 backward": "pool_1_backward_s",
    "backward, all": "backward_s",
}


def times_table(loop: StepTimes, kernel: StepTimes, kernel_name: str) -> Table:
    """Milliseconds of one step by the loop and by a kernel, and their ratio; theirs behind ours."""
    table = Table("one step of LeNet", box=None, pad_edge=False, header_style="bold")
    for title in ("loop ms", f"{kernel_name} ms", "ratio", "their loop ms", "their CUDA ms", "their ratio"):
        table.add_column(title, justify="right", style="dim" if title.startswith("their") else "")
    for what, field in TIMED.items():
        cells = []
        for slow, fast in ((loop, kernel), (OLD_LOOP, OLD_KERNEL)):
            slow_s, fast_s = getattr(slow, field), getattr(fast, field)
            cells += [f"{1e3 * slow_s:,.3f}", f"{1e3 * fast_s:,.3f}", f"{slow_s / fast_s:,.1f}x"]
        table.add_row(what, *cells)
    return table


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """The file as it is now: whole, or as it was before."""
    aside = path.with_name(f".{path.name}.new")
    pd.DataFrame(list(rows)).to_csv(aside, index=False, float_format="%.6g")
    aside.replace(path)


def draw(path: Path, runs: Mapping[str, pd.DataFrame], old: Mapping[str, pd.DataFrame], title: str) -> None:
    """Loss above, error below, a column for each model; training dashed; theirs where `old` has the model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, len(runs), figsize=(4.6 * len(runs), 7), squeeze=False, layout="constrained")
    figure.suptitle(title, fontsize=10)
    for (name, ours), (above, below) in zip(runs.items(), grid.T, strict=True):
        _curves(above, name, "loss", ours, old.get(name))
        _curves(below, name, "err", ours, old.get(name))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _curves(axis: Axes, name: str, what: str, ours: pd.DataFrame, old: pd.DataFrame | None) -> None:
    """One panel: `what` is loss, in nats, or err, in percent."""
    scale, form, label = (100.0, "{:.2f} %", "error (%)") if what == "err" else (1.0, "{:.3f}", "loss (nats)")
    ends: list[str] = []
    for rows, who, colour in ((old, "theirs", THEIRS), (ours, "ours", OURS)):
        if rows is None:
            continue
        test, train = scale * rows[f"test_{what}"], scale * rows[f"train_{what}"]
        axis.plot(rows.epoch, test, color=colour, label=f"{who}, test")
        # an error of exactly 0 has no place on a logarithmic axis
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
