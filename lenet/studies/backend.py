"""`gptscale lenet backend`: NCCL against Gloo, and how far two runs of one backend lie apart.

The text's backends differ by 0.7 and 1.9 %, from one run each, while one of its configurations took 67.2, 80.3 and 78.6 s in
three tables. Here each runs several times in turn. Without CUDA there is no NCCL: Gloo is measured against itself, which tells
the difference below which nothing can be said.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptscale.common.settings.command_line import parse
from gptscale.lenet.data import Augmentation
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.run.preflight import world_from_environment
from gptscale.lenet.studies.bars import draw_bars
from gptscale.lenet.studies.reference_figures import BACKENDS
from gptscale.lenet.studies.study import (
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Cell,
    Column,
    StudyOptions,
    check_nproc,
    finish,
    grouped,
    memory_note,
    not_significant,
    of,
    run_grid,
    table,
    values_of,
    whole_numbers,
)


@dataclass(frozen=True)
class BackendOptions(StudyOptions):
    """The same runs by each backend. The text: the CNN on cifar10, 15 epochs, 2 GPUs, one run each."""

    per_rank: str = "32,128"
    """Images per step of one process, with commas between; the global batch is that times --nproc."""
    nproc: int = 2
    """Processes, at least 2."""
    repeats: int = 5
    """Turns of the whole grid, each with a seed of its own. Of two equal rows with 3 repeats each, one pair in ten has spreads
    that do not overlap; with 5, one in 126."""
    model: str = "cnn"
    """As in gptscale lenet train."""
    augment: Augmentation = "jitter"
    """As in gptscale lenet train."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nproc(self.nproc, 2)

    @property
    def batches(self) -> list[int]:
        """The images per rank."""
        return whole_numbers(self.per_rank, "per-rank", "32,128")


COLUMNS = (
    Column("training s", of("train_time_s"), ".2f", spread=True),
    Column("update ms/step", of("update_s", 1e3), ".2f", spread=True),
    Column("images/s", of("images_per_s"), ",.0f"),
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Column("accuracy %", of("test_accuracy", 100), ".2f", spread=True),
)


def contenders(on_cuda: bool) -> dict[str, str]:
    """The backends by the name of their rows."""
    return {"NCCL": "nccl", "Gloo": "gloo"} if on_cuda else {"Gloo": "gloo", "Gloo again": "gloo"}


def grid(options: BackendOptions, backends: dict[str, str]) -> list[list[Cell]]:
    """For each batch the rows that are to be compared."""
    same: dict[str, Any] = {"model": options.model, "augment": options.augment, "optimizer": "adamw", "strategy": "ddp"}
    same |= {"weight_decay": 0.05, "lr_schedule": "onecycle"}
    return [
        [
            Cell(f"{name}, {n} per rank", same | {"batch_size": n * options.nproc, "backend": backend}, options.nproc)
            for name, backend in backends.items()
        ]
        for n in options.batches
    ]


def verdict(groups: dict[str, list[Any]], column: Column) -> list[str]:
    """Whether the two variants in `groups` differ in `column`, and by how much."""
    (a, ours), (b, theirs) = values_of(groups, column).items()
    apart = statistics.median(theirs) / statistics.median(ours) - 1
    said = f"{column.title}: the median of {b} lies {apart:+.1%} from {a}'s"
    if min(len(ours), len(theirs)) < 2:
        return [f"{said}; one run each tells nothing of their spread"]
    return [
        said,
        *(not_significant(groups, column) or [f"{column.title}: {a} and {b} differ, their spreads do not overlap"]),
    ]


def old_rows(titles: Sequence[str]) -> list[dict[str, str]]:
    """The text's rows in the columns of ours, its MB taken for MiB."""
    return [
        dict.fromkeys(titles, "-")
        | {"run": f"text D: {name}, {n} per rank", "training s": f"{seconds:.2f}", "peak GiB": f"{mb / 1024:.3f}"}
        for name, n, seconds, mb in BACKENDS
    ]


def main(argv: Sequence[str]) -> int:
    """Run the grid, print the table, write the files."""
    options = parse(BackendOptions, argv, prog="gptscale lenet backend", about="NCCL against Gloo.")
    on_cuda = world_from_environment(VisionConfig(device=options.device)).device.type == "cuda"
    if not on_cuda:
        print("note: nccl is not run: it needs CUDA devices; gloo runs twice instead", flush=True)
    compared = grid(options, contenders(on_cuda))
    cells = [cell for pair in compared for cell in pair]
    rows = run_grid("backend", cells, options)
    groups = grouped(rows, cells)
    lines = table(groups, COLUMNS)
    notes = [memory_note(rows)]
    for pair in compared:
        notes += verdict({cell.variant: groups[cell.variant] for cell in pair}, COLUMNS[0])
    title = f"{options.model} on {rows.data.iloc[0]}, {options.nproc} processes, {rows.device.iloc[0]}"
    finish(
        "backend",
        options,
        rows,
        [*lines, *old_rows(list(lines[0]))],
        notes,
        lambda path: draw_bars(groups, [*COLUMNS[:2], PEAK_MEMORY], title, path),
    )
    return 0
