"""Tables of vision runs: medians over repeats with their spread, and what spreads say of two variants.

A group is the rows of lenet.csv of one variant, its repeats.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import visible
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd

Lines = list[dict[str, str]]
# The rows of each variant: of its runs, or of their epochs.
Groups = Mapping[str, "pd.DataFrame"]
# Width of a printed table where output is no terminal.
LOG_COLUMNS = 150


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, the column of the rows that it shows, how to format it, and what to multiply it with.

    name: of several names, with blanks between, a row's first one that is not empty counts.
    spread: whether the lowest and highest repeat stand behind the median.
    """

    title: str
    name: str
    form: str
    factor: float = 1.0
    spread: bool = False

    def values(self, rows: pd.DataFrame) -> list[float]:
        """Return the figures of the rows that have one."""
        figures = rows[self.name.split()].bfill(axis=1).iloc[:, 0].dropna()
        return [float(figure) * self.factor for figure in figures]


ACCURACY = Column("accuracy %", "test_accuracy", ".2f", 100, spread=True)
# Memory of tensors on a GPU, or the resident set of the process where there is no GPU.
AVERAGE_MEMORY = Column("average GiB", "avg_mem_gib", ".3f", spread=True)
PEAK_MEMORY = Column("peak GiB", "peak_mem_allocated_gib peak_rss_gib", ".3f")
# A GPU's share of time with a kernel, or where there is no GPU the processor's, where 100 is one core.
BUSY = Column("busy %", "gpu_util_percent cpu_util_percent", ".0f")


def table(groups: Groups, columns: Sequence[Column]) -> Lines:
    """Return a line of formatted cells for each variant: medians over the repeats, with the spread where a column has it."""
    lines = []
    for variant, rows in groups.items():
        line = {"run": variant}
        for column in columns:
            values = column.values(rows)
            if column.spread and len(values) > 1:
                line[column.title] = spread(values, column.form)
            else:
                line[column.title] = format(statistics.median(values), column.form) if values else "-"
        lines.append(line)
    return lines


def spread(values: Collection[float], form: str, between: str = "-") -> str:
    """Return the median, and behind it the lowest and the highest."""
    low, median, high = (format(number, form) for number in (min(values), statistics.median(values), max(values)))
    return f"{median} ({low}{between}{high})"


def with_references(lines: Lines, references: Lines) -> Lines:
    """Return the lines, and below them those of `references`, with "-" for every figure that they do not give."""
    return [*lines, *(dict.fromkeys(lines[0], "-") | reference for reference in references)]


def class_medians(rows: pd.DataFrame) -> pd.Series:
    """Return the median accuracy of each class over the rows in percent, without classes that have no test images."""
    return 100 * class_accuracies(rows).median().dropna()


def class_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a column for each class with its accuracies, NaN for one without test images."""
    import pandas as pd

    numbers: pd.DataFrame = rows.class_accuracy.str.split(expand=True).apply(pd.to_numeric, errors="coerce")
    return numbers


def class_table(groups: Groups, reports: Sequence[Mapping[str, Any]] = ()) -> Lines:
    """Return a line for each variant with the accuracy of each class in percent, medians over the repeats.

    reports: runs of reports with their `name` and accuracies `by_class` in percent, which get lines below.
    """
    every = [(variant, class_medians(rows).items()) for variant, rows in groups.items()]
    every += [(report["name"], enumerate(report["by_class"])) for report in reports]
    return [{"run": name} | {str(label): f"{percent:.2f}" for label, percent in by_class} for name, by_class in every]


def loss_table(curves: Groups, reports: Sequence[Mapping[str, Any]] = ()) -> Lines:
    """Return a line for each variant with the training loss of each epoch, medians over the repeats.

    reports: runs of reports with their `name` and `losses` of each epoch, which get lines below.
    """
    lines = [(variant, list(epochs.groupby("epoch").train_loss.median())) for variant, epochs in curves.items()]
    longest = max((len(losses) for _, losses in lines), default=0)
    lines += [(report["name"], report["losses"]) for report in reports] if lines else []
    titles = [f"epoch {i + 1}" for i in range(longest)]
    return [
        {"run": name} | dict.fromkeys(titles, "-") | {t: f"{loss:.4f}" for t, loss in zip(titles, losses, strict=False)}
        for name, losses in lines
    ]


def accuracy_table(curves: Groups, n_epochs: int = 4) -> Lines:
    """Return a line for each variant with the test accuracy at `n_epochs` epochs, evenly apart, medians with their spread."""
    longest = max((int(epochs.epoch.max()) for epochs in curves.values()), default=0)
    shown = sorted({round(longest * (i + 1) / n_epochs) for i in range(n_epochs)} - {0})
    # A row for each run, and a column for each epoch.
    runs = {
        name: epochs.pivot(index="run_id", columns="epoch", values="test_accuracy") for name, epochs in curves.items()
    }
    groups = {name: of_variant.reindex(columns=shown).rename(columns=str) for name, of_variant in runs.items()}
    return table(groups, [Column(f"accuracy % after epoch {n}", str(n), ".2f", 100, spread=True) for n in shown])


def overlaps(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether the ranges of two sets of repeats overlap, so that the order of their medians means nothing."""
    return max(a) >= min(b) and max(b) >= min(a)


def values_of(groups: Groups, column: Column) -> dict[str, list[float]]:
    """Return the figures of every variant in `column`."""
    return {name: column.values(rows) for name, rows in groups.items()}


def not_significant(groups: Groups, column: Column) -> list[str]:
    """Return a sentence for each pair of variants whose spreads of `column` overlap."""
    values = [(name, repeats) for name, repeats in values_of(groups, column).items() if len(repeats) > 1]
    pairs = [(a, b) for (a, of_a), (b, of_b) in combinations(values, 2) if overlaps(of_a, of_b)]
    return [f"{column.title}: {a} and {b} do not differ significantly, their spreads overlap" for a, b in pairs]


def as_fast_as_the_first(groups: Groups, column: Column) -> list[str]:
    """Return a sentence for each other variant whose spread of `column` overlaps with that of the first."""
    first, *others = groups
    pairs = ({first: groups[first], other: groups[other]} for other in others)
    return [sentence for pair in pairs for sentence in not_significant(pair, column)]


def show(lines: Lines) -> None:
    """Print a table, whose first column holds words."""
    titles = list(lines[0])
    render.console(LOG_COLUMNS).print(render.table(titles, (line.values() for line in lines), left=titles[:1]))


def finish(
    every: Sequence[Lines], notes: Sequence[str], md: Path | None, png: Path | None, draw: Callable[[Path], object],
    written: Sequence[Path | None] = (),
) -> None:  # fmt: skip
    """Print the tables and the notes, write the Markdown and the figure, and name all files that are written."""
    for lines in every:
        show(lines)
    for note in notes:
        print(f"note: {note}")
    if md:
        pages = [
            render.markdown(lines, left=list(lines[0])[:1], notes=notes if lines is every[-1] else ())
            for lines in every
        ]
        md.write_text("\n".join(pages))
    if png:
        png.parent.mkdir(parents=True, exist_ok=True)
        draw(png)
    for path in filter(None, (*written, md, png)):
        print(f"wrote {visible(str(path))}")


# Figures of the reports as they gave them (docs/lenet/README.md). Their hardware differs (2080 Ti, A100, H100), so that seconds
# show the shape of a result and accuracies its level. Report D's MB are taken as MiB, and its 10 layers are one convolution that
# is applied ten times. With two GPUs its accuracy is that of rank 0. The average memory of report C was typed in by hand.
_reports = json.loads(Path(__file__).with_name("reports.json").read_text())
# Lines for the table of each study, by its columns' titles.
ROWS: dict[str, list[dict[str, str]]] = _reports["rows"]
# LeNet-5 on MNIST, 10 epochs: losses by epoch, accuracies in percent by class. adam: rate 0.001, losses of each 200 batches.
# The others: RandomAffine(15, .1, .8-1.2), batch 32. ddp: 8 processes with 4 workers each. dataparallel: on 8 GPUs.
RUNS: dict[str, dict[str, Any]] = _reports["runs"]
