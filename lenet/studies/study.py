"""What every study shares: a grid of runs, each in processes of its own, repeated in turn; medians with their spread; files."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import ConfigError, GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import run_captured
from gptscale.common.process.world import runs_on_cuda
from gptscale.lenet.run.columns import read_summary
from gptscale.lenet.run.config import VisionConfig, option_words
from gptscale.lenet.run.preflight import local_world, make_plan

LOG_COLUMNS = 150  # where there is no terminal whose width could be asked
RUN_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class StudyOptions:
    """What every study asks: on which images, how long, how often, and where its files go."""

    data: str = "digits"
    """As in gptscale lenet train."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist and cifar10."""
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

    def __post_init__(self) -> None:
        for name, high in (("epochs", 10**6), ("repeats", 1000)):
            if not 1 <= getattr(self, name) <= high:
                what = f"{name} {getattr(self, name)} is out of range"
                raise ConfigError(what, f"in --{name}", f"use 1 to {high}")
        check_files(self, ("csv", "md", "png"))


def whole_numbers(text: str, option: str, example: str, *, least: int = 1) -> list[int]:
    """Whole numbers with commas between, none below `least`; ConfigError for anything else."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{text!r} is no list of numbers", f"in --{option}", f"use for example {example}")
    return [int(word) for word in words]


def check_nproc(nproc: int, low: int) -> None:
    """ConfigError for a number of processes below `low`, or absurd."""
    if not low <= nproc <= 1024:
        raise ConfigError(f"nproc {nproc} is out of range", "in --nproc", f"use {low} to 1024")


def check_files(options: Any, names: Sequence[str]) -> None:
    """ConfigError for a file that is a folder, or lies in none."""
    for name in names:
        file = getattr(options, name)
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            problem = "is a folder" if file.is_dir() else "is in a folder that does not exist"
            raise ConfigError(f"{file} {problem}", f"in --{name}", "name a file in a folder that exists")


@dataclass(frozen=True)
class Cell:
    """One configuration of a grid: its name, what it changes in the run, its number of processes.

    accepts: exit statuses beside 0 that are a result and not the end of the study.
    """

    variant: str
    options: dict[str, Any]
    nproc: int = 1
    accepts: tuple[int, ...] = ()


def run_grid(study: str, cells: Sequence[Cell], options: StudyOptions) -> pd.DataFrame:
    """Run every cell `repeats` times, in turn; their rows of lenet.csv. Raises ConfigError before the first run."""
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
    for cell, config in zip(cells, configs, strict=True):
        make_plan(config, local_world(config, cell.nproc))
    names = []
    for turn in range(options.repeats):
        for cell, config in zip(cells, configs, strict=True):
            print(f"round {turn + 1} of {options.repeats}: {cell.variant}", file=sys.stderr, flush=True)
            names.append(f"{study}-{uuid.uuid4().hex[:12]}")
            _run(dataclasses.replace(config, seed=turn + 1, run_name=names[-1]), cell)
    rows = read_summary(options.out / "lenet.csv")
    return rows[rows.run_id.isin(names)]


def _run(config: VisionConfig, cell: Cell) -> None:
    """One run by the command, in processes of its own, so that no run's memory or threads are another's."""
    words = ("lenet", "train", "--nproc", str(cell.nproc), *option_words(config))
    program = Program("gptscale.launchers.cli", words)
    ended = run_captured(program, timeout=RUN_TIMEOUT_S, fork=not runs_on_cuda(config.device))
    if ended.returncode not in (0, *cell.accepts):
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise GptscaleError(f"{cell.variant} failed ({last[:300]})", "in the study", "see the message of that run")


@dataclass(frozen=True)
class Column:
    """A figure of a table: its title, how to get it from a row, and how to write it."""

    title: str
    value: Callable[[Any], float | None]
    form: str
    spread: bool = False


def of(name: str, factor: float = 1.0) -> Callable[[Any], float | None]:
    """The getter of a column of lenet.csv, times `factor`; None where the cell is empty."""
    return lambda row: None if pd.isna(row[name]) else float(row[name]) * factor


def first_of(*names: str) -> Callable[[Any], float | None]:
    """The getter of the first of these columns that is not empty."""
    return lambda row: next((float(row[name]) for name in names if not pd.isna(row[name])), None)


# Tensors on a GPU; where there is none, the resident set of the process.
AVERAGE_MEMORY = Column("average GiB", of("avg_mem_gib"), ".3f", spread=True)
PEAK_MEMORY = Column("peak GiB", first_of("peak_mem_allocated_gib", "peak_rss_gib"), ".3f")


def memory_note(rows: pd.DataFrame) -> str:
    """What the columns of memory count here."""
    if rows.peak_mem_allocated_gib.notna().any():
        return "memory is what tensors took on the GPU of a rank"
    return "memory is the resident set of a rank's process, Python and torch included: there is no GPU"


def grouped(rows: pd.DataFrame, cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """The rows of each variant that ended well, in the order of the grid."""
    ended = rows[rows.status == "ok"]
    return {c.variant: [row for _, row in ended[ended.variant == c.variant].iterrows()] for c in cells}


def failures(rows: pd.DataFrame) -> list[str]:
    """What went wrong in rows that are in no median, as sentences."""
    return [
        f"{row.variant}, seed {row.seed}: {row.status}, {row.error}" for _, row in rows.iterrows() if row.status != "ok"
    ]


def table(groups: dict[str, list[Any]], columns: Sequence[Column], first: str = "run") -> list[dict[str, str]]:
    """Cells for people: medians over the repeats, with lowest and highest where a column asks for its spread."""
    found = []
    for variant, rows in groups.items():
        line = {first: variant}
        for column in columns:
            values = [v for row in rows if (v := column.value(row)) is not None]
            text = format(statistics.median(values), column.form) if values else "-"
            if column.spread and len(values) > 1:
                text += f" ({min(values):{column.form}}-{max(values):{column.form}})"
            line[column.title] = text
        found.append(line)
    return found


def overlaps(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two sets of repeats reach into each other, so that the order of their medians means nothing."""
    return max(a) >= min(b) and max(b) >= min(a)


def values_of(groups: dict[str, list[Any]], column: Column) -> dict[str, list[float]]:
    """What every variant's rows have in `column`."""
    return {name: [v for row in rows if (v := column.value(row)) is not None] for name, rows in groups.items()}


def not_significant(groups: dict[str, list[Any]], column: Column) -> list[str]:
    """Pairs of variants whose spreads of `column` overlap, as sentences."""
    values = values_of(groups, column)
    names = [name for name, found in values.items() if len(found) > 1]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if overlaps(values[a], values[b])]
    return [f"{column.title}: {a} and {b} do not differ significantly, their spreads overlap" for a, b in pairs]


def show(cells: Sequence[dict[str, str]]) -> None:
    """The table on standard output."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for i, title in enumerate(cells[0]):
        shown.add_column(title, justify="left" if i == 0 else "right")
    for row in cells:
        shown.add_row(*row.values())
    Console(width=None if Console().is_terminal else LOG_COLUMNS).print(shown)


def markdown(cells: Sequence[dict[str, str]], notes: Sequence[str] = ()) -> str:
    """The table as Markdown, notes below it."""
    lines = [list(cells[0]), ["---", *["---:"] * (len(cells[0]) - 1)], *(list(row.values()) for row in cells)]
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return text + ("\n" + "".join(f"* {note}\n" for note in notes) if notes else "")


def finish(
    study: str,
    options: StudyOptions,
    rows: pd.DataFrame,
    cells: Sequence[dict[str, str]],
    notes: Sequence[str],
    draw: Callable[[Path], None],
) -> None:
    """Print the table and its notes, and write the files."""
    show(cells)
    for note in notes:
        print(f"note: {note}")
    if options.csv:
        rows.to_csv(options.csv, index=False)
    if options.md:
        options.md.write_text(markdown(cells, notes))
    picture = options.png or options.out / f"{study}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(picture)
    for path in (options.csv, options.md, picture):
        if path:
            print(f"wrote {path}")
