"""The parts that every study shares: its options, a grid of runs, medians with their spread, and its files.

Each cell of the grid is a run in processes of its own. The grid is repeated in turn, once for each seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from gptscale.common.settings.checks import (
    OptionNeed,
    check_output_file,
    check_range,
    check_ranges,
    parse_whole_numbers,
    refuse_changed,
)
from gptscale.common.settings.command_line import parse
from gptscale.lenet.comparison import figures, tables
from gptscale.lenet.comparison.tables import ROWS, Column, Groups, Lines
from gptscale.lenet.data import Augmentation
from gptscale.lenet.run.config import TORCHVISION_NEED, VisionConfig
from gptscale.lenet.studies.grid import Cell, run_grid
from gptscale.results.render import DPI

if TYPE_CHECKING:
    import pandas as pd

    from gptscale.lenet.comparison.rows import MeasuredRows


@dataclass(frozen=True)
class StudyFiles:
    """Options of every study: on which images and which device it works, and where its files go."""

    data: str = "digits"
    """As in gptscale lenet train."""
    data_dir: Path = Path("data")
    """Where torchvision keeps mnist and cifar10."""
    download: bool = False
    """Download mnist or cifar10 to --data-dir if it is not there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """As in gptscale lenet train."""
    out: Path = Path("results")
    """Folder for lenet.csv, runs/, and the figure."""
    csv: Path | None = None
    """File for the rows of this study. The rows of its epochs go to NAME-epochs.csv beside it."""
    md: Path | None = None
    """File for the tables in Markdown."""
    png: Path | None = None
    """File for the figure; default STUDY.png in --out."""

    NEEDS: ClassVar[tuple[OptionNeed, ...]] = (TORCHVISION_NEED,)

    def __post_init__(self) -> None:
        for name in ("csv", "md", "png"):
            check_output_file(getattr(self, name), f"--{name}")

    def picture(self, study: str) -> Path:
        return self.png or self.out / f"{study}.png"


@dataclass(frozen=True)
class GridOptions(StudyFiles):
    """Options of a study that trains a grid of runs, or shows the rows of earlier calls."""

    rows: str = ""
    """What earlier calls wrote by --csv, with commas between: their rows are shown together, and nothing is run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows:
            others = {f.name for f in dataclasses.fields(self)} - {"rows", "out", "csv", "md", "png"}
            refuse_changed(self, sorted(others), "--rows runs nothing")

    @property
    def seed_numbers(self) -> Sequence[int]:
        """The seed of each turn of the grid."""
        raise NotImplementedError

    def base(self, study: str) -> VisionConfig:
        """Return what all runs of the study share."""
        shared = {name: getattr(self, name) for name in ("data", "device", "out")}
        return VisionConfig(**shared, data_dir=self.data_dir.absolute(), study=study, tensorboard=False)


@dataclass(frozen=True)
class StudyOptions(GridOptions):
    """Options of a study whose runs last as long, and are repeated as often, as one says."""

    epochs: int = 3
    """Passes over the training images, in each run."""
    repeats: int = 3
    """Turns of the whole grid, each with a seed of its own."""
    first_seed: int = 1
    """Seed of the first turn, which the others count up from: further turns may be another call, see --rows."""
    max_steps: int | None = None
    """Ends each run after that many optimizer steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"epochs": (1, 10**6), "repeats": (1, 1000), "first_seed": (0, 10**9)})

    @property
    def seed_numbers(self) -> Sequence[int]:
        return range(self.first_seed, self.first_seed + self.repeats)

    def base(self, study: str) -> VisionConfig:
        return dataclasses.replace(super().base(study), epochs=self.epochs, max_steps=self.max_steps)


@dataclass(frozen=True)
class PerRankOptions(StudyOptions):
    """Options of a study of the images per rank, with the CNN as in report D."""

    per_rank: str = "16,32,64,128"
    """Images per step of one process, with commas between; the global batch is that times --nproc."""
    nproc: int = 2
    """Processes that share each batch."""
    model: str = "cnn"
    """As in gptscale lenet train."""
    augment: Augmentation = "jitter"
    """As in gptscale lenet train."""

    LEAST_NPROC: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.nproc, self.LEAST_NPROC, 1024, "nproc")

    @property
    def batches(self) -> list[int]:
        return parse_whole_numbers(self.per_rank, "--per-rank", f"use for example {type(self).per_rank}")


OptionsT = TypeVar("OptionsT", bound=GridOptions)


@dataclass(frozen=True)
class StudyResult(Generic[OptionsT]):
    """What a study measured, in the order of its grid. rows: those of lenet.csv."""

    options: OptionsT
    measured: MeasuredRows

    @property
    def rows(self) -> pd.DataFrame:
        return self.measured.runs

    @cached_property
    def groups(self) -> Groups:
        """The rows of each variant that ended well."""
        ended = self.rows[self.rows.status == "ok"]
        return {variant: ended[ended.variant == variant] for variant in dict.fromkeys(self.rows.variant)}

    @cached_property
    def curves(self) -> Groups:
        """The epochs of the runs of each variant that has any."""
        epochs = self.measured.epochs
        return {v: of_variant for v in self.groups if len(of_variant := epochs[epochs.variant == v])}

    def title(self, setting: str) -> str:
        """Return the title of the figure: the model, its data, what the runs share, and the device."""
        row = self.rows.iloc[0]
        return f"{row.model} on {row.data}, {setting}, {row.device}"

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
    """One study: the runs that it compares, and its tables, notes and figure.

    options: their docstring is what --help says of the study. draw(result, title, path) writes the figure. not_run: rows of what
    did not run, above those of the reports. more_tables: tables below the first one; those without lines are left out.
    places: see run_grid.
    """

    options: type[OptionsT]
    cells: Callable[[OptionsT], list[Cell]]
    columns: Sequence[Column]
    notes: Callable[[StudyResult[OptionsT]], list[str]]
    title: Callable[[StudyResult[OptionsT]], str]
    draw: Callable[[StudyResult[OptionsT], str, Path], None]
    not_run: Callable[[StudyResult[OptionsT]], Lines] = field(default=lambda result: [])
    more_tables: Callable[[StudyResult[OptionsT]], list[Lines]] = field(default=lambda result: [])
    places: Callable[[OptionsT], Sequence[Mapping[str, str]]] = field(default=lambda options: [{}])


def run_study(name: str, study: Study[OptionsT], argv: Sequence[str]) -> int:
    """Run the grid of a study or read --rows, print its tables, write its files, and return the exit status."""
    options, runs = parse(study.options, argv, prog=f"gptscale lenet {name}", about=str(study.options.__doc__)), None
    if not options.rows:
        base, places = options.base(name), study.places(options)
        runs = run_grid(study.cells(options), base, options.seed_numbers, places, download=options.download)
    # pandas, not before the options are read and the warm parent has begun
    from gptscale.lenet.comparison.rows import read_rows, rows_of_runs, write_rows

    rows = read_rows(options.rows, name) if runs is None else rows_of_runs(options.out, runs)
    result = StudyResult(options, rows)
    references = [*study.not_run(result), *ROWS[name]]
    lines = tables.with_references(tables.table(result.groups, study.columns), references)
    title = study.title(result)
    every = [lines, *filter(None, study.more_tables(result))]
    written = write_rows(options.csv, result.measured) if options.csv else []
    notes, png = study.notes(result), options.picture(name)
    tables.finish(every, notes, options.md, png, lambda path: study.draw(result, title, path), written)
    return 0


def draw(
    columns: Sequence[Sequence[Column]], result: StudyResult[Any], title: str, path: Path,
    reports: Sequence[Mapping[str, Any]] = (),
) -> None:  # fmt: skip
    """Write a figure of loss and accuracy by epoch, and below it a panel of bars for each set of columns.

    Runs of one epoch have no curves. reports: runs of reports, whose losses and accuracies by class are drawn too.
    """
    # The reports trained for longer, on other hardware: their seconds share no axis with ours.
    rows_of_reports = ROWS[str(result.rows.study.iloc[0])]
    references = [{title: cell for title, cell in row.items() if title != "training s"} for row in rows_of_reports]
    curved = bool(result.curves) and result.rows.epochs.max() > 1
    counts = [2 + bool(reports), len(columns)] if curved else [len(columns)]
    bars_in = 1.6 + 0.42 * max(len(result.groups) + len(figures.numbers(references, of_panel)) for of_panel in columns)
    figure, rows = figures.grid(counts, [4.2, bars_in][-len(counts) :], 16.0, title)
    if curved:
        figures.curves(rows[0][0], result.curves, "train_loss", "training loss", reports=reports)
        figures.curves(rows[0][1], result.curves, "test_accuracy", "test accuracy (%)", 100)
        if reports:
            rows[0][0].set_yscale("log")
            figures.classes(rows[0][2], result.groups, [report for report in reports if "by_class" in report])
    for panel, of_panel in zip(rows[-1], columns, strict=True):
        name = of_panel[0].title if len(of_panel) == 1 else "memory (GiB)"
        figures.bars(panel, result.groups, of_panel, name, references)
    figure.savefig(path, dpi=DPI)
