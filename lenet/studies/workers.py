"""`gptscale lenet workers`: the gain of the DataLoader's workers, with augmentation and without, and the fast loader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from gptscale.common.settings.checks import parse_whole_numbers
from gptscale.lenet.comparison.tables import Column, not_significant
from gptscale.lenet.studies.grid import Cell
from gptscale.lenet.studies.study import Study, StudyOptions, draw


@dataclass(frozen=True)
class WorkersOptions(StudyOptions):
    """A run for each number of workers, then for the fast loader, and all of it again without augmentation."""

    workers: str = "0,2,4"
    """Numbers of worker processes with commas between."""
    batch_size: int = 32
    """Images per step."""


def grid(options: WorkersOptions) -> list[Cell]:
    """Return a cell for every number of workers and for the fast loader, with augmentation and without."""
    cells, counts = [], parse_whole_numbers(options.workers, "--workers", "use for example 0,2,4", least=0)
    for augment, suffix in (("affine", ""), ("none", ", not augmented")):
        base: dict[str, Any] = {"augment": augment, "batch_size": options.batch_size}
        for n in counts:
            cells.append(Cell(f"{n} workers{suffix}", base | {"loader": "dataloader", "num_workers": n}))
        cells.append(Cell(f"fast loader{suffix}", base))
    return cells


COLUMNS = (
    Column("load ms/step", "load_s", ".2f", 1e3, spread=True),
    Column("update ms/step", "update_s", ".2f", 1e3, spread=True),
    Column("training s", "train_time_s", ".1f", spread=True),
    Column("images/s", "images_per_s", ",.0f"),
    Column("accuracy %", "test_accuracy", ".2f", 100),
)
STUDY = Study(
    options=WorkersOptions,
    cells=grid,
    columns=COLUMNS,
    notes=lambda result: not_significant(result.groups, COLUMNS[2]),
    title=lambda result: result.title(f"batch {result.rows.batch_size.iloc[0]}"),
    draw=partial(draw, [[column] for column in COLUMNS[:3]]),
)
