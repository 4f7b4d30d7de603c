"""`gptscale lenet baseline`: LeNet-5 with random affine augmentation, beside the reports' figures, also by class."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.process.begin import share_cores
from gptscale.common.settings.checks import check_output_file, parse_whole_numbers, refuse_changed
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.needs import OptionNeed
from gptscale.lenet.comparison import figures
from gptscale.lenet.comparison.reference_figures import EXERCISE_ACCURACY, LENET_WITH_ADAM, LENET_WITH_AFFINE
from gptscale.lenet.comparison.tables import (
    ACCURACY,
    Column,
    accuracy_table,
    class_medians,
    class_table,
    loss_table,
    of,
    show,
    with_references,
)
from gptscale.lenet.comparison.tables import table as table_of_groups
from gptscale.lenet.models import Gelu
from gptscale.lenet.run.config import TORCHVISION_NEED, VisionConfig
from gptscale.lenet.run.presets import preset
from gptscale.results.render import DPI, markdown, subplots

if TYPE_CHECKING:
    import pandas as pd

    from gptscale.lenet.comparison.rows import MeasuredRows

# Of several presets.
PRESET_COLUMNS = (
    Column("epochs", of("epochs"), ".0f"),
    Column("batch", of("batch_size"), ".0f"),
    Column("highest rate", of("lr"), "g"),
    ACCURACY,
)
# Report A's loss of an epoch is the mean of its four.
LOSSES_BY_EPOCH = (
    {"name": LENET_WITH_ADAM["name"], "losses": [statistics.mean(losses) for losses in LENET_WITH_ADAM["losses"]]},
    LENET_WITH_AFFINE,
)


@dataclass(frozen=True)
class BaselineOptions:
    """LeNet-5 on one data set, once for each seed."""

    data: str = "digits"
    """digits | mnist | a folder of idx files; see gptscale lenet train --help."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist."""
    download: bool = False
    """Download mnist to --data-dir if it is not there."""
    preset: str = "auto"
    """text (as in report B) | report_a | report_a_002 | onecycle | digits | fast | best; auto: digits or onecycle, by --data."""
    seeds: str = "1,2,3"
    """Numbers with commas between; a run each."""
    rows: str = ""
    """What earlier calls wrote by --csv, with commas between: their rows are shown together, and nothing is run."""
    gelu: Gelu | None = None
    """As in gptscale lenet train."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in gptscale lenet train."""
    out: Path = Path("results")
    """Folder for lenet.csv, runs/, and the files below."""
    csv: Path | None = None
    """File for this command's rows of lenet.csv; those of their epochs go beside it, to NAME-epochs.csv."""
    png: Path | None = None
    """File for the figure; default baseline-PRESET.png in --out."""
    md: Path | None = None
    """File for the table in Markdown."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (TORCHVISION_NEED,)

    def __post_init__(self) -> None:
        if self.preset != "auto":
            preset(self.preset)
        for name in ("csv", "png", "md"):
            check_output_file(getattr(self, name), f"--{name}")
        if self.rows:
            names = "data data_dir download preset seeds gelu device".split()
            refuse_changed(self, names, "--rows runs nothing")

    @property
    def seed_numbers(self) -> list[int]:
        """The seeds."""
        return parse_whole_numbers(self.seeds, "--seeds", "use for example 1,2,3", least=0)

    @property
    def resolved_preset(self) -> str:
        """The preset's name with auto resolved."""
        if self.preset != "auto":
            return self.preset
        return "digits" if self.data == "digits" else "onecycle"

    def config(self, seed: int) -> VisionConfig:
        """Return the options of the run of one seed."""
        settings: dict[str, Any] = {name: getattr(self, name) for name in ("data", "data_dir", "download", "out")}
        settings |= {
            "study": "baseline",
            "variant": self.resolved_preset,
            "gelu": self.gelu,
            "device": self.device,
            "seed": seed,
        }
        return VisionConfig(model="lenet", **settings | preset(self.resolved_preset))


def main(argv: Sequence[str]) -> int:
    """Train once for each seed, print the tables, draw the figure, and return 0 if every run ended well."""
    options = parse(BaselineOptions, argv, prog="gptscale lenet baseline", about="LeNet-5 beside the reports' figures.")
    # pandas, not before the options are read
    from gptscale.lenet.comparison.rows import beside, read_rows, write_rows
    from gptscale.lenet.comparison.windows import earlier_windows

    if options.rows:
        measured, windows = read_rows(options.rows, "baseline"), earlier_windows(options.rows)
    else:
        runs = train_seeds(options)
        if isinstance(runs, int):
            return runs
        measured, windows = runs
    tables = seed_tables(measured, windows) if measured.runs.variant.nunique() == 1 else preset_tables(measured)
    for lines in tables:
        show(lines)
    written = write_rows(options.csv, measured) if options.csv else []
    if options.csv and not windows.empty:
        written.append(beside(options.csv, "windows"))
        windows.to_csv(written[-1], index=False)
    write(options, measured, tables, written)
    return 0


def train_seeds(options: BaselineOptions) -> tuple[MeasuredRows, pd.DataFrame] | int:
    """Train once for each seed in this process and return the rows, or the exit status of a run that did not end well."""
    import pandas as pd

    from gptscale.lenet.comparison.rows import rows_of_runs
    from gptscale.lenet.comparison.windows import window_losses
    from gptscale.lenet.run.columns import SUMMARY_NAME, read_summary

    # It imports torch, so not before the options are read.
    from gptscale.lenet.run.preflight import world_from_environment
    from gptscale.lenet.run.worker import train

    configs = [options.config(seed) for seed in options.seed_numbers]
    world = world_from_environment(configs[0])
    if world.world_size > 1:
        raise ConfigError("the baseline is one process", "in the launch", "start it without torchrun")
    share_cores()
    names, windows = [], [pd.DataFrame()]
    for config in configs:
        print(f"seed {config.seed}: {options.resolved_preset} on {options.data}", flush=True)
        outcome = train(config, world)
        if outcome.exit_status:
            return outcome.exit_status
        names.append(outcome.row["run_id"])
        if options.resolved_preset.startswith("report_a"):
            windows.append(window_losses(pd.read_csv(outcome.folder / "steps.csv")).assign(seed=config.seed))
    runs = read_summary(options.out / SUMMARY_NAME).set_index("run_id").loc[names].reset_index()
    return rows_of_runs(options.out, runs), pd.concat(windows, ignore_index=True)


def seed_tables(measured: MeasuredRows, windows: pd.DataFrame) -> list[list[dict[str, str]]]:
    """Return the tables of one preset: a line for each seed, losses of each 200 batches where there are any, and classes."""
    from gptscale.lenet.comparison.windows import losses_by_window

    rows = measured.runs.to_dict("records")
    groups = {f"seed {row['seed']}": [row] for row in rows} | {"median": rows}
    tables = [table(measured), losses_by_window(windows)] if not windows.empty else [table(measured)]
    return [*tables, class_table(groups, [LENET_WITH_AFFINE])]


def preset_tables(measured: MeasuredRows) -> list[list[dict[str, str]]]:
    """Return the tables of several presets, a line for each: medians over its seeds with lowest and highest, and the reports'."""
    groups, curves = _by_preset(measured)
    references = [
        {"run": line["run"], ACCURACY.title: line["accuracy"].removesuffix(" %")} for line in _reference_lines()
    ]
    tables = [with_references(table_of_groups(groups, PRESET_COLUMNS), references)]
    if curves:
        tables += [accuracy_table(curves), loss_table(curves, LOSSES_BY_EPOCH)]
    return [*tables, class_table(groups, [LENET_WITH_AFFINE])]


def _by_preset(measured: MeasuredRows) -> tuple[dict[str, list[Any]], dict[str, list[pd.DataFrame]]]:
    """Return the runs of each preset, and the epochs of each of its runs, for those that have any."""
    from gptscale.lenet.comparison.rows import by_variant

    groups: dict[str, list[Any]] = {}
    for row in measured.runs.to_dict("records"):
        groups.setdefault(row["variant"], []).append(row)
    return groups, by_variant(measured.epochs, list(groups))


def table(measured: MeasuredRows) -> list[dict[str, str]]:
    """Return the lines of the table: one for each seed, their median, and those of the exercise and the reports."""
    losses = measured.epochs.groupby("run_id").train_loss.agg(["first", "last"])
    rows: list[dict[str, Any]] = measured.runs.join(losses, on="run_id").to_dict("records")  # type: ignore[assignment]
    lines = [_median_line(f"seed {row['seed']}", [row]) for row in rows]
    return with_references([*lines, _median_line("median", rows)], _reference_lines())


def _reference_lines() -> list[dict[str, str]]:
    """Return the figures of the exercise and of reports A and B by column title."""
    exercise = {"run": "exercise: must exceed", "accuracy": f"{EXERCISE_ACCURACY:.2f} %"}
    report_a = {"run": LENET_WITH_ADAM["name"], "accuracy": f"{LENET_WITH_ADAM['accuracy']:.2f} %"}
    report_a |= {"loss, first epoch": f"{statistics.mean(LENET_WITH_ADAM['losses'][0]):.4f}"}
    report_a |= {"loss, last epoch": f"{statistics.mean(LENET_WITH_ADAM['losses'][-1]):.4f}"}
    worst = min(range(10), key=lambda i: LENET_WITH_AFFINE["by_class"][i])
    report_b = {
        "run": LENET_WITH_AFFINE["name"],
        "accuracy": f"{LENET_WITH_AFFINE['accuracy']:.2f} %",
        "seconds": f"{LENET_WITH_AFFINE['seconds']}",
    }
    report_b |= {
        "loss, first epoch": f"{LENET_WITH_AFFINE['losses'][0]:.4f}",
        "loss, last epoch": f"{LENET_WITH_AFFINE['losses'][-1]:.4f}",
    }
    report_b |= {"worst class": f"{worst}: {LENET_WITH_AFFINE['by_class'][worst]:.2f} %"}
    return [exercise, report_a, report_b]


def _median_line(name: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    def median(key: str, form: str) -> str:
        # Not every run has it: NaN is what an empty cell becomes.
        values = [row[key] for row in rows if row[key] == row[key]]
        return format(statistics.median(values), form) if len(values) == len(rows) else "-"

    by_class = class_medians(rows)
    worst = min(by_class, key=lambda label: by_class[label])
    return {
        "run": name,
        "accuracy": f"{statistics.median(row['test_accuracy'] for row in rows):.2%}".replace("%", " %"),
        "loss, first epoch": median("first", ".4f"),
        "loss, last epoch": median("last", ".4f"),
        "worst class": f"{worst}: {by_class[worst]:.2%}".replace("%", " %"),
        "seconds": median("train_time_s", ".1f"),
        "with tests and loading": median("total_time_s", ".1f"),
        "to 99 %": median("seconds_to_99", ".1f"),
        "to 99.4 %": median("seconds_to_99_4", ".1f"),
        "images/s": median("images_per_s", ",.0f"),
    }


def write(
    options: BaselineOptions, measured: MeasuredRows, tables: Sequence[list[dict[str, str]]], written: Sequence[Path]
) -> None:
    """Write the tables and the figure, and name all files that are written."""
    if options.md:
        options.md.write_text("\n".join(markdown(lines, left=["run", "epoch"]) for lines in tables))
    one_preset = measured.runs.variant.nunique() == 1
    picture = options.png or options.out / f"baseline-{measured.runs.variant.iloc[0] if one_preset else 'presets'}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    (draw if one_preset else draw_presets)(measured, picture)
    for path in (*written, options.md, picture):
        if path:
            print(f"wrote {path}")


def draw(measured: MeasuredRows, path: Path) -> None:
    """Write a figure of training loss and test accuracy by epoch, and of accuracy by class.

    On MNIST, whose images the reports used too, the reports' figures are drawn beside those of the runs.
    """
    rows = measured.runs.to_dict("records")
    epochs = [measured.epochs[measured.epochs.run_id == row["run_id"]] for row in rows]
    first = rows[0]
    title = (
        f"LeNet-5 on {first['data']}: {first['epochs']} epochs, batch {first['batch_size']}, {first['lr_schedule']} "
        f"{first['lr']:g}, on {first['device']}"
    )
    figure, axes = subplots(1, 3, (15, 4.4), title)
    left, middle, right = axes[0]
    for frame, row in zip(epochs, rows, strict=True):
        left.plot(frame.epoch, frame.train_loss, marker="o", markersize=3, label=f"seed {row['seed']}")
        middle.plot(frame.epoch, 100 * frame.test_accuracy, marker="o", markersize=3, label=f"seed {row['seed']}")
    by_class = class_medians(rows)
    percentages = [100 * accuracy for accuracy in by_class.values()]
    if first["data"] == "MNIST":
        width = 0.4
        right.bar([label - width / 2 for label in by_class], percentages, width, label="ours")
        _draw_reports(left, middle, right, width)
    else:
        right.bar(list(by_class), percentages, 0.7, label="ours")
    left.set(title="training loss", xlabel="epoch", yscale="log")
    low = max(90.0, 100 * min(frame.test_accuracy.min() for frame in epochs) - 0.2)
    middle.set(title="test accuracy (%)", xlabel="epoch", ylim=(low, 100))
    right.set(title="test accuracy by class (%)", ylim=(min(98.0, min(percentages) - 0.5), 100))
    right.set_xticks(range(len(by_class)))
    for panel in axes[0]:
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=DPI)


def draw_presets(measured: MeasuredRows, path: Path) -> None:
    """Write a figure of several presets: training loss and test accuracy by epoch, and accuracy by class."""
    groups, curves = _by_preset(measured)
    first = measured.runs.iloc[0]
    title = f"LeNet-5 on {first['data']}, thin lines are seeds, on {first.device}"
    figure, (panels,) = figures.grid([3] if curves else [1], [4.6], 16.0, title)
    if curves:
        figures.curves(panels[0], curves, "train_loss", "training loss", reports=LOSSES_BY_EPOCH)
        panels[0].set_yscale("log")
        figures.curves(panels[1], curves, "test_accuracy", "test accuracy (%)", 100)
    figures.classes(panels[-1], groups, [LENET_WITH_AFFINE])
    # Room for the legend above the dots.
    low, high = panels[-1].get_ylim()
    panels[-1].set_ylim(low, high + 0.3 * (high - low))
    figure.savefig(path, dpi=DPI)


def _draw_reports(losses: Any, accuracies: Any, classes: Any, width: float) -> None:
    """Draw the figures of reports A and B in the three panels."""
    epochs = range(1, 11)
    losses.plot(epochs, [statistics.mean(of_epoch) for of_epoch in LENET_WITH_ADAM["losses"]], "k:", label="report A")
    losses.plot(epochs, LENET_WITH_AFFINE["losses"], "k--", label="report B")
    for report, label, style in ((LENET_WITH_ADAM, "report A", ":"), (LENET_WITH_AFFINE, "report B", "--")):
        accuracies.axhline(report["accuracy"], color="k", linestyle=style, linewidth=1, label=label)
    places = [label + width / 2 for label in range(10)]
    classes.bar(places, LENET_WITH_AFFINE["by_class"], width, color="grey", label="report B")
