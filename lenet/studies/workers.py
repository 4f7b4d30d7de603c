"""`gptscale lenet workers`: what worker processes of a DataLoader buy, with and without augmentation, beside the fast loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptscale.common.settings.command_line import parse
from gptscale.lenet.studies.bars import draw_bars
from gptscale.lenet.studies.reference_figures import AUGMENTATION_LOADS, WORKERS
from gptscale.lenet.studies.study import (
    Cell,
    Column,
    StudyOptions,
    finish,
    grouped,
    not_significant,
    of,
    run_grid,
    table,
    whole_numbers,
)


@dataclass(frozen=True)
class WorkersOptions(StudyOptions):
    """A run for each number of workers, then for the fast loader; all of it again without augmentation."""

    workers: str = "0,2,4"
    """Numbers of worker processes with commas between."""
    batch_size: int = 32
    """Images per step."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of workers."""
        return whole_numbers(self.workers, "workers", "0,2,4", least=0)


COLUMNS = (
    Column("load ms/step", of("load_s", 1e3), ".2f", spread=True),
    Column("update ms/step", of("update_s", 1e3), ".2f", spread=True),
    Column("training s", of("train_time_s"), ".1f", spread=True),
    Column("images/s", of("images_per_s"), ",.0f"),
    Column("accuracy %", of("test_accuracy", 100), ".2f"),
)


def grid(options: WorkersOptions) -> list[Cell]:
    """Every number of workers and the fast loader, with augmentation and without."""
    cells = []
    for augment in ("affine", "none"):
        name = "" if augment == "affine" else ", not augmented"
        base: dict[str, Any] = {"augment": augment, "batch_size": options.batch_size}
        for n in options.numbers:
            cells.append(Cell(f"{n} workers{name}", base | {"loader": "dataloader", "num_workers": n}))
        cells.append(Cell(f"fast loader{name}", base))
    return cells


def old_rows(titles: Sequence[str]) -> list[dict[str, str]]:
    """The text's table in the columns of ours."""
    empty = dict.fromkeys(titles, "-")
    rows = [
        empty
        | {
            "run": f"text B: {n} workers",
            "load ms/step": f"{1e3 * load:.2f}",
            "update ms/step": f"{1e3 * update:.2f}",
            "training s": f"{total:.1f}",
            "accuracy %": f"{accuracy:.2f}",
        }
        for n, load, update, total, accuracy in WORKERS
    ]
    plain = {"run": "text B: 0 workers, not augmented", "load ms/step": f"{1e3 * AUGMENTATION_LOADS[1]:.2f}"}
    return [*rows, empty | plain]


def main(argv: Sequence[str]) -> int:
    """Run the grid, print the table, write the files."""
    options = parse(WorkersOptions, argv, prog="gptscale lenet workers", about="What DataLoader workers buy.")
    cells = grid(options)
    rows = run_grid("workers", cells, options)
    groups = grouped(rows, cells)
    lines = table(groups, COLUMNS)
    title = f"LeNet-5 on {rows.data.iloc[0]}, batch {options.batch_size}, {rows.device.iloc[0]}"
    finish(
        "workers",
        options,
        rows,
        [*lines, *old_rows(list(lines[0]))],
        not_significant(groups, COLUMNS[2]),
        lambda path: draw_bars(groups, COLUMNS[:3], title, path),
    )
    return 0
