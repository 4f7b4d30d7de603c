"""`gptscale lenet batch`: what the batch of a rank does to time, memory and accuracy.

The text laid two GPUs with 32 images each beside one GPU with 32 and found them 38 % faster and 3 % worse. Half of the steps
was the reason for both. Here one process with the same global batch stands beside the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptscale.common.settings.command_line import parse
from gptscale.lenet.data import Augmentation
from gptscale.lenet.run.schedule import Schedule
from gptscale.lenet.studies.bars import draw_bars
from gptscale.lenet.studies.reference_figures import BATCHES
from gptscale.lenet.studies.study import (
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Cell,
    Column,
    StudyOptions,
    check_nproc,
    failures,
    finish,
    grouped,
    memory_note,
    not_significant,
    of,
    run_grid,
    table,
    whole_numbers,
)

ALONE = 32  # the text's batch on one GPU


@dataclass(frozen=True)
class BatchOptions(StudyOptions):
    """The study's CNN with AdamW and OneCycle, with more and more images per rank. The text: cifar10, 15 epochs, 2 GPUs."""

    per_rank: str = "16,32,64,128"
    """Images per step of one process, with commas between; the global batch is that times --nproc."""
    nproc: int = 2
    """Processes; beside them one process runs with 32 images, and with the global batch of 32 a rank."""
    model: str = "cnn"
    """As in gptscale lenet train."""
    augment: Augmentation = "jitter"
    """As in gptscale lenet train."""
    lr: float = 1e-3
    """Peak rate, the same for every batch as the text had it."""
    lr_schedule: Schedule = "onecycle"
    """As in gptscale lenet train."""
    weight_decay: float = 0.05
    """Of AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nproc(self.nproc, 1)

    @property
    def batches(self) -> list[int]:
        """The images per rank."""
        return whole_numbers(self.per_rank, "per-rank", "16,32,64,128")


COLUMNS = (
    Column("global batch", of("batch_size"), ".0f"),
    Column("training s", of("train_time_s"), ".1f", spread=True),
    Column("images/s", of("images_per_s"), ",.0f"),
    Column("loading %", of("load_fraction", 100), ".1f"),
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Column("accuracy %", of("test_accuracy", 100), ".2f", spread=True),
)


def grid(options: BatchOptions) -> list[Cell]:
    """One process with the text's batch and with the whole batch of its two GPUs, then every batch per rank."""
    names = ("model", "augment", "lr", "lr_schedule", "weight_decay")
    same: dict[str, Any] = {name: getattr(options, name) for name in names} | {"optimizer": "adamw"}
    worlds = [(options.nproc, n) for n in options.batches]
    worlds = list(dict.fromkeys([(1, ALONE), (1, ALONE * options.nproc), *worlds]))
    return [Cell(f"{p} x {n}", same | {"batch_size": p * n}, p) for p, n in worlds]


def old_rows(titles: Sequence[str]) -> list[dict[str, str]]:
    """The text's rows in the columns of ours, its MB taken for MiB."""
    return [
        dict.fromkeys(titles, "-")
        | {
            "run": f"text D: {p} x {n}",
            "global batch": str(p * n),
            "training s": f"{seconds:.1f}",
            "peak GiB": f"{mb / 1024:.3f}",
            "accuracy %": f"{accuracy:.2f}",
        }
        for p, n, seconds, mb, accuracy in BATCHES
    ]


def main(argv: Sequence[str]) -> int:
    """Run the grid, print the table, write the files."""
    options = parse(BatchOptions, argv, prog="gptscale lenet batch", about="What the batch of a rank does.")
    cells = grid(options)
    rows = run_grid("batch", cells, options)
    groups = grouped(rows, cells)
    lines = table(groups, COLUMNS)
    title = f"{options.model} on {rows.data.iloc[0]}, processes x images per step of each, {rows.device.iloc[0]}"
    finish(
        "batch",
        options,
        rows,
        [*lines, *old_rows(list(lines[0]))],
        [memory_note(rows), *failures(rows), *not_significant(groups, COLUMNS[6])],
        lambda path: draw_bars(groups, [COLUMNS[1], PEAK_MEMORY, COLUMNS[6]], title, path),
    )
    return 0
