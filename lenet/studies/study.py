"""The parts that every study shares: its options, a grid of runs, medians with their spread, and its files.

Each cell of the grid is a run in processes of its own. The grid is repeated in turn, once for each seed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from gptscale.common.errors import GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import begin_warm_parent, run_captured
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.needs import OptionNeed
from gptscale.lenet.run.config import TORCHVISION_NEED, VisionConfig, option_words
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd

# Width of a printed table where output is no terminal.
LOG_COLUMNS = 150
RUN_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class StudyOptions:
    """Options of every study: on which images, for how long and how often it trains, and where its files go."""

    data: str = "digits"
    """As in gptscale lenet train."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist and cifar10."""
    download: bool = False
    """Download mnist or cifar10 to --data-dir if it is not there."""
    epochs: int = 3
    """Of each run."""
    repeats: int = 3
    """Turns of the whole grid, each with a seed of its own."""
    max_steps: int | None = None
    """Ends each run after that many optimizer steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in gptscale lenet train."""
    out: Path = Path("results")
    """Folder for lenet.csv, runs/, and the figure."""
    csv: Path | None = None
    """File for this study's rows of lenet.csv."""
    md: Path | None = None
    """File for the table in Markdown."""
    png: Path | None = None
    """File for the figure; default STUDY.png in --out."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (TORCHVISION_NEED,)

    def __post_init__(self) -> None:
        check_ranges(self, {"epochs": (1, 10**6), "repeats": (1, 1000)})
        for name in ("csv", "md", "png"):
            check_output_file(getattr(self, name), f"--{name}")


@dataclass(frozen=True)
class Cell:
    """One configuration of a grid: its name, the options that it changes, and its number of processes.

    accepts: exit statuses beside 0 that are a result and do not end the study.
    """

    variant: str
    options: dict[str, Any]
    nproc: int = 1
    accepts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of a study's table: its title, how to read its figure from a row, and how to format it.

    spread: whether the lowest and highest repeat stand behind the median.
    """

    title: str
    value: Callable[[Any], float | None]
    form: str
    spread: bool = False


OptionsT = TypeVar("OptionsT", bound=StudyOptions)


@dataclass(frozen=True)
class StudyResult(Generic[OptionsT]):
    """The rows of lenet.csv of a study that has run."""

    options: OptionsT
    cells: Sequence[Cell]
    rows: pd.DataFrame

    @cached_property
    def groups(self) -> dict[str, list[Any]]:
        """The rows of each variant that ended well, in the order of the grid."""
        ended = self.rows[self.rows.status == "ok"]
        return {c.variant: [row for _, row in ended[ended.variant == c.variant].iterrows()] for c in self.cells}

    def title(self, model: str, setting: str) -> str:
        """Return the title of the figure: the model, its data, what the runs share, and the device."""
        return f"{model} on {self.rows.data.iloc[0]}, {setting}, {self.rows.device.iloc[0]}"

    def failures(self) -> list[str]:
        """Return a sentence for each row that is in no median because its run failed."""
        failed = self.rows[self.rows.status != "ok"]
        return [f"{row.variant}, seed {row.seed}: {row.status}, {row.error}" for _, row in failed.iterrows()]

    def memory_note(self) -> str:
        """Return a sentence about what the columns of memory count on this machine."""
        if self.rows.peak_mem_allocated_gib.notna().any():
            return "memory is what tensors took on the GPU of a rank"
        return "memory is the resident set of a rank's process, Python and torch included: there is no GPU"


@dataclass(frozen=True)
class Study(Generic[OptionsT]):
    """One study: the runs that it compares, and its table, notes and figure.

    reference_rows: rows of a report (docs/lenet/README.md), and others that did not run, by column title; "-" where one has no
    figure. draw(result, title, path) writes the figure.
    """

    name: str
    about: str
    options: type[OptionsT]
    cells: Callable[[OptionsT], list[Cell]]
    columns: Sequence[Column]
    reference_rows: Callable[[OptionsT], list[dict[str, str]]]
    notes: Callable[[StudyResult[OptionsT]], list[str]]
    title: Callable[[StudyResult[OptionsT]], str]
    draw: Callable[[StudyResult[OptionsT], str, Path], None]


def run_study(study: Study[OptionsT], argv: Sequence[str]) -> int:
    """Run the grid of a study, print its table, write its files, and return the exit status."""
    options = parse(study.options, argv, prog=f"gptscale lenet {study.name}", about=study.about)
    cells = study.cells(options)
    result = StudyResult(options, cells, run_grid(study.name, cells, options))
    lines = table(result.groups, study.columns)
    lines += [dict.fromkeys(lines[0], "-") | row for row in study.reference_rows(options)]
    title = study.title(result)
    finish(study.name, options, result.rows, lines, study.notes(result), lambda path: study.draw(result, title, path))
    return 0


def run_grid(study: str, cells: Sequence[Cell], options: StudyOptions) -> pd.DataFrame:
    """Run every cell `repeats` times, in turn, and return their rows of lenet.csv.

    All cells are checked before the first run, so that a ConfigError is raised before anything has run.
    """
    # Before the first import of torch, which the warm parent and its runs then share.
    begin_warm_parent(options.device, imports=["gptscale.lenet.run.worker"])
    from gptscale.lenet.run.columns import read_summary
    from gptscale.lenet.run.preflight import local_world, make_plan

    base = VisionConfig(
        data=options.data,
        data_dir=options.data_dir.absolute(),
        epochs=options.epochs,
        max_steps=options.max_steps,
        device=options.device,
        out=options.out,
        study=study,
        tensorboard=False,
    )
    configs = [dataclasses.replace(base, variant=cell.variant, **cell.options) for cell in cells]
    for i, (cell, config) in enumerate(zip(cells, configs, strict=True)):
        # Once, here, and not in each run.
        make_plan(dataclasses.replace(config, download=options.download and i == 0), local_world(config, cell.nproc))
    names = []
    for turn in range(options.repeats):
        for cell, config in zip(cells, configs, strict=True):
            print(f"round {turn + 1} of {options.repeats}: {cell.variant}", file=sys.stderr, flush=True)
            names.append(f"{study}-{uuid.uuid4().hex[:12]}")
            run_cell(dataclasses.replace(config, seed=turn + 1, run_name=names[-1]), cell)
    rows = read_summary(options.out / "lenet.csv")
    return rows[rows.run_id.isin(names)]


def run_cell(config: VisionConfig, cell: Cell) -> None:
    """Train one run by the command, in processes of its own, so that no run shares memory or threads with another."""
    from gptscale.common.process.world import runs_on_cuda

    words = ("lenet", "train", "--nproc", str(cell.nproc), *option_words(config))
    program = Program("gptscale.launchers.cli", words)
    ended = run_captured(program, timeout=RUN_TIMEOUT_S, fork=not runs_on_cuda(config.device))
    if ended.returncode not in (0, *cell.accepts):
        last_line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        what = f"{cell.variant} failed ({last_line[:300]})"
        raise GptscaleError(what, "in the study", "see the message of that run")


def of(name: str, factor: float = 1.0) -> Callable[[Any], float | None]:
    """Return the reader of a column of lenet.csv, times `factor`, which gives None for an empty cell."""

    def value(row: Any) -> float | None:
        number = float(row[name])
        return None if math.isnan(number) else number * factor

    return value


def first_of(*names: str) -> Callable[[Any], float | None]:
    """Return the reader of the first of these columns of lenet.csv that is not empty."""
    return lambda row: next((float(row[name]) for name in names if not math.isnan(float(row[name]))), None)


# Memory of tensors on a GPU, or the resident set of the process where there is no GPU.
AVERAGE_MEMORY = Column("average GiB", of("avg_mem_gib"), ".3f", spread=True)
PEAK_MEMORY = Column("peak GiB", first_of("peak_mem_allocated_gib", "peak_rss_gib"), ".3f")


def table(groups: dict[str, list[Any]], columns: Sequence[Column]) -> list[dict[str, str]]:
    """Return a line of formatted cells for each variant: medians over the repeats, with the spread where a column has it."""
    lines = []
    for variant, rows in groups.items():
        line = {"run": variant}
        for column in columns:
            values = [v for row in rows if (v := column.value(row)) is not None]
            text = format(statistics.median(values), column.form) if values else "-"
            if column.spread and len(values) > 1:
                text += f" ({min(values):{column.form}}-{max(values):{column.form}})"
            line[column.title] = text
        lines.append(line)
    return lines


def overlaps(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether the ranges of two sets of repeats overlap, so that the order of their medians means nothing."""
    return max(a) >= min(b) and max(b) >= min(a)


def values_of(groups: dict[str, list[Any]], column: Column) -> dict[str, list[float]]:
    """Return the figures of every variant in `column`."""
    return {name: [v for row in rows if (v := column.value(row)) is not None] for name, rows in groups.items()}


def not_significant(groups: dict[str, list[Any]], column: Column) -> list[str]:
    """Return a sentence for each pair of variants whose spreads of `column` overlap."""
    values = values_of(groups, column)
    names = [name for name, repeats in values.items() if len(repeats) > 1]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if overlaps(values[a], values[b])]
    return [f"{column.title}: {a} and {b} do not differ significantly, their spreads overlap" for a, b in pairs]


def show(lines: Sequence[dict[str, str]]) -> None:
    """Print the table."""
    titles = list(lines[0])
    render.console(LOG_COLUMNS).print(render.table(titles, (line.values() for line in lines), left=titles[:1]))


def finish(
    study: str,
    options: StudyOptions,
    rows: pd.DataFrame,
    lines: Sequence[dict[str, str]],
    notes: Sequence[str],
    draw: Callable[[Path], None],
) -> None:
    """Print the table and its notes, and write the files."""
    show(lines)
    for note in notes:
        print(f"note: {note}")
    if options.csv:
        rows.to_csv(options.csv, index=False)
    if options.md:
        options.md.write_text(render.markdown(lines, left=list(lines[0])[:1], notes=notes))
    picture = options.png or options.out / f"{study}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(picture)
    for path in (options.csv, options.md, picture):
        if path:
            print(f"wrote {path}")
