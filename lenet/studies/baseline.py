"""`gptscale lenet baseline`: LeNet-5 with random affine augmentation, per-class accuracy, beside the texts' own figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from gptscale.common.errors import ConfigError
from gptscale.common.process.begin import share_cores
from gptscale.common.settings.command_line import parse
from gptscale.lenet.models import Gelu
from gptscale.lenet.run.columns import SUMMARY_COLUMNS, read_summary
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.run.presets import preset
from gptscale.lenet.run.worker import RunOutcome, train
from gptscale.lenet.studies.reference_figures import EXERCISE_ACCURACY, REPORT_A, REPORT_B
from gptscale.lenet.studies.study import check_files, markdown, show, whole_numbers


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
    """text (as the texts had it) | onecycle | digits | fast | best; auto: digits for digits, else onecycle."""
    seeds: str = "1,2,3"
    """Numbers with commas between; a run each."""
    gelu: Gelu | None = None
    """As in gptscale lenet train."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in gptscale lenet train."""
    out: Path = Path("results")
    """Folder for lenet.csv, runs/, and the files below."""
    csv: Path | None = None
    """File for this command's rows of lenet.csv."""
    png: Path | None = None
    """File for the figure; default baseline-PRESET.png in --out."""
    md: Path | None = None
    """File for the table in Markdown."""

    def __post_init__(self) -> None:
        if self.preset != "auto":
            preset(self.preset)
        check_files(self, ("csv", "png", "md"))

    @property
    def numbers(self) -> list[int]:
        """The seeds."""
        return whole_numbers(self.seeds, "seeds", "1,2,3", least=0)

    @property
    def resolved_preset(self) -> str:
        """The preset's name with auto resolved."""
        return self.preset if self.preset != "auto" else "digits" if self.data == "digits" else "onecycle"

    def config(self, seed: int) -> VisionConfig:
        """The run of one seed."""
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
    """Run, print the table, draw the figure; 0 if every run ended well."""
    options = parse(BaselineOptions, argv, prog="gptscale lenet baseline", about="LeNet-5 beside the texts' figures.")
    configs = [options.config(seed) for seed in options.numbers]
    world = world_from_environment(configs[0])
    if world.world_size > 1:
        raise ConfigError("the baseline is one process", "in the launch", "start it without torchrun")
    share_cores()
    outcomes = []
    for config in configs:
        print(f"seed {config.seed}: {options.resolved_preset} on {options.data}", flush=True)
        outcome = train(config, world)
        if outcome.exit_status:
            return outcome.exit_status
        outcomes.append(outcome)
    cells = table(outcomes)
    show(cells)
    write(options, outcomes, cells)
    return 0


def table(outcomes: Sequence[RunOutcome]) -> list[dict[str, str]]:
    """Cells for people: a row for each seed, their median, and the texts' rows below."""
    losses = [pd.read_csv(o.folder / "epochs.csv").train_loss for o in outcomes]
    ours = [o.row | {"first": ls.iloc[0], "last": ls.iloc[-1]} for o, ls in zip(outcomes, losses, strict=True)]
    rows = [_ours(f"seed {row['seed']}", [row]) for row in ours]
    rows.append(_ours("median", ours))
    empty = dict.fromkeys(rows[0], "-")
    asked = {"run": "exercise: must exceed", "accuracy": f"{EXERCISE_ACCURACY:.2f} %"}
    report_a = {"run": REPORT_A["name"], "accuracy": f"{REPORT_A['accuracy']:.2f} %"}
    report_a |= {"loss, first epoch": f"{statistics.mean(REPORT_A['losses'][0]):.4f}"}
    report_a |= {"loss, last epoch": f"{statistics.mean(REPORT_A['losses'][-1]):.4f}"}
    worst = min(range(10), key=lambda i: REPORT_B["by_class"][i])
    report_b = {
        "run": REPORT_B["name"],
        "accuracy": f"{REPORT_B['accuracy']:.2f} %",
        "seconds": f"{REPORT_B['seconds']}",
    }
    report_b |= {
        "loss, first epoch": f"{REPORT_B['losses'][0]:.4f}",
        "loss, last epoch": f"{REPORT_B['losses'][-1]:.4f}",
    }
    report_b |= {"worst class": f"{worst}: {REPORT_B['by_class'][worst]:.2f} %"}
    return [*rows, *(empty | text for text in (asked, report_a, report_b))]


def _ours(name: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    def middle(key: str, form: str) -> str:
        values = [row[key] for row in rows if row.get(key) is not None]
        return format(statistics.median(values), form) if len(values) == len(rows) else "-"

    by_class = class_medians(rows)
    worst = min(by_class, key=lambda label: by_class[label])
    return {
        "run": name,
        "accuracy": f"{statistics.median(row['test_accuracy'] for row in rows):.2%}".replace("%", " %"),
        "loss, first epoch": middle("first", ".4f"),
        "loss, last epoch": middle("last", ".4f"),
        "worst class": f"{worst}: {by_class[worst]:.2%}".replace("%", " %"),
        "seconds": middle("train_time_s", ".1f"),
        "with tests and loading": middle("total_time_s", ".1f"),
        "to 99 %": middle("seconds_to_99", ".1f"),
        "to 99.4 %": middle("seconds_to_99_4", ".1f"),
        "images/s": middle("images_per_s", ",.0f"),
    }


def class_medians(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Median accuracy of each class over the rows; classes without test images are left out."""
    columns = zip(*(str(row["class_accuracy"]).split() for row in rows), strict=True)
    return {label: statistics.median(map(float, cells)) for label, cells in enumerate(columns) if "-" not in cells}


def write(options: BaselineOptions, outcomes: Sequence[RunOutcome], cells: list[dict[str, str]]) -> None:
    """The files that the options name, and the figure."""
    names = [outcome.row["run_id"] for outcome in outcomes]
    if options.csv:
        rows = read_summary(options.out / "lenet.csv")
        rows[rows.run_id.isin(names)].to_csv(options.csv, index=False, columns=SUMMARY_COLUMNS)
    if options.md:
        options.md.write_text(markdown(cells))
    picture = options.png or options.out / f"baseline-{options.resolved_preset}.png"
    draw([pd.read_csv(o.folder / "epochs.csv") for o in outcomes], [o.row for o in outcomes], picture)
    for path in (options.csv, options.md, picture):
        if path:
            print(f"wrote {path}")


def draw(epochs: Sequence[pd.DataFrame], rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Training loss and test accuracy by epoch, accuracy by class; the texts' figures beside ours where the data is theirs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    is_mnist = rows[0]["data"] == "MNIST"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), constrained_layout=True)
    for frame, row in zip(epochs, rows, strict=True):
        left.plot(frame.epoch, frame.train_loss, marker="o", markersize=3, label=f"seed {row['seed']}")
        middle.plot(frame.epoch, 100 * frame.test_accuracy, marker="o", markersize=3, label=f"seed {row['seed']}")
    by_class = class_medians(rows)
    width = 0.4 if is_mnist else 0.7
    right.bar(
        [label - width / 2 * is_mnist for label in by_class], [100 * v for v in by_class.values()], width, label="ours"
    )
    if is_mnist:
        n = range(1, 11)
        left.plot(n, [statistics.mean(four) for four in REPORT_A["losses"]], "k:", label="text A")
        left.plot(n, REPORT_B["losses"], "k--", label="text B")
        for report, style in ((REPORT_A, "k:"), (REPORT_B, "k--")):
            middle.axhline(report["accuracy"], color="k", linestyle=style[1:], linewidth=1, label=report["name"][:6])
        right.bar([label + width / 2 for label in range(10)], REPORT_B["by_class"], width, color="grey", label="text B")
    left.set(title="training loss", xlabel="epoch", yscale="log")
    low = max(90.0, 100 * min(frame.test_accuracy.min() for frame in epochs) - 0.2)
    middle.set(title="test accuracy (%)", xlabel="epoch", ylim=(low, 100))
    right.set(title="test accuracy by class (%)", ylim=(min(98.0, 100 * min(by_class.values()) - 0.5), 100))
    right.set_xticks(range(len(by_class)))
    for axes in (left, middle, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    first = rows[0]
    figure.suptitle(
        f"LeNet-5 on {first['data']}: {first['epochs']} epochs, batch {first['batch_size']}, {first['lr_schedule']} "
        f"{first['lr']:g}, on {first['device']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
