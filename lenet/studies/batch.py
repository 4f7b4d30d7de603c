"""`gptscale lenet batch`: what the batch of a rank does to time, memory and accuracy.

Report D (docs/lenet/README.md) compared two GPUs with 32 images each to one GPU with 32 images, and found them 38 % faster and
3 % less accurate. Both came from half as many steps. Here one process with the same global batch stands beside the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from gptscale.lenet.comparison import tables
from gptscale.lenet.comparison.tables import ACCURACY, AVERAGE_MEMORY, PEAK_MEMORY, Column, not_significant
from gptscale.lenet.run.config import Schedule
from gptscale.lenet.studies.grid import Cell
from gptscale.lenet.studies.study import PerRankOptions, Study, draw

# Images per step on one GPU in report D.
SINGLE_GPU_BATCH = 32


@dataclass(frozen=True)
class BatchOptions(PerRankOptions):
    """The CNN with AdamW and OneCycle, with more and more images per rank. Report D: cifar10, 15 epochs, 2 GPUs."""

    nproc: int = 2
    """Processes; beside them one process runs with 32 images, and with the global batch of 32 a rank."""
    lr: float = 1e-3
    """Peak rate, the same for every batch as in report D."""
    lr_schedule: Schedule = "onecycle"
    """As in gptscale lenet train."""
    weight_decay: float = 0.05
    """Of AdamW."""


def grid(options: BatchOptions) -> list[Cell]:
    """Return cells with one process, as in report D and with the global batch of its two GPUs, then with every batch per rank."""
    names = ("model", "augment", "lr", "lr_schedule", "weight_decay")
    shared: dict[str, Any] = {name: getattr(options, name) for name in names} | {"optimizer": "adamw"}
    single = [(1, SINGLE_GPU_BATCH), (1, SINGLE_GPU_BATCH * options.nproc)]
    pairs = dict.fromkeys([*single, *((options.nproc, n) for n in options.batches)])
    return [Cell(f"{p} x {n}", shared | {"batch_size": p * n}, p) for p, n in pairs]


COLUMNS = (
    Column("global batch", "batch_size", ".0f"),
    Column("training s", "train_time_s", ".1f", spread=True),
    Column("images/s", "images_per_s", ",.0f"),
    Column("loading %", "load_fraction", ".1f", 100),
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    ACCURACY,
)
STUDY = Study(
    options=BatchOptions,
    cells=grid,
    columns=COLUMNS,
    notes=lambda result: [result.memory_note(), *result.failures(), *not_significant(result.groups, ACCURACY)],
    title=lambda result: result.title("processes x images per step of each"),
    more_tables=lambda result: [tables.accuracy_table(result.curves)],
    draw=partial(draw, [[COLUMNS[1]], [ACCURACY]]),
)
