"""`gptscale lenet backend`: NCCL against Gloo, and the difference between equal runs of one backend.

The backends of report D (docs/lenet/README.md) differ by 0.7 and 1.9 %, from one run each, while one of its configurations took
67.2, 80.3 and 78.6 s in three tables. Here each backend runs several times in turn. Without CUDA there is no NCCL, and Gloo is
measured against itself. A difference between real backends that is not larger than that one means nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gptscale.lenet.comparison.tables import (
    ACCURACY,
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    Column,
    Groups,
    not_significant,
    values_of,
)
from gptscale.lenet.studies.grid import Cell
from gptscale.lenet.studies.study import PerRankOptions, Study, StudyResult, draw


@dataclass(frozen=True)
class BackendOptions(PerRankOptions):
    """The same runs by each backend. Report D: the CNN on cifar10, 15 epochs, 2 GPUs, one run each."""

    per_rank: str = "32,128"
    """Images per step of one process, with commas between; the global batch is that times --nproc."""
    nproc: int = 2
    """Processes, at least 2."""
    repeats: int = 5
    """Turns of the whole grid, each with a seed of its own. Of two equal rows with 3 repeats each, one pair in ten has spreads
    that do not overlap; with 5, one in 126."""

    LEAST_NPROC: ClassVar[int] = 2


def cells(options: BackendOptions) -> list[Cell]:
    """Return the pair of cells that are compared for each batch size, and print a note where Gloo stands in for NCCL."""
    from gptscale.common.process.world import World

    backends = {"NCCL": "nccl", "Gloo": "gloo"}
    if World.from_environment(options.device).device.type != "cuda":
        print("note: nccl is not run: it needs CUDA devices; gloo runs twice instead", flush=True)
        backends = {"Gloo": "gloo", "Gloo again": "gloo"}
    shared: dict[str, Any] = {"model": options.model, "augment": options.augment, "optimizer": "adamw"}
    shared |= {"strategy": "ddp", "weight_decay": 0.05, "lr_schedule": "onecycle"}
    return [
        Cell(f"{name}, {n} per rank", shared | {"batch_size": n * options.nproc, "backend": backend}, options.nproc)
        for n in options.batches
        for name, backend in backends.items()
    ]


def verdict(groups: Groups, column: Column) -> list[str]:
    """Return sentences about whether the two variants in `groups` differ in `column`, and by how much."""
    (a, a_values), (b, b_values) = values_of(groups, column).items()
    difference = statistics.median(b_values) / statistics.median(a_values) - 1
    sentence = f"{column.title}: the median of {b} lies {difference:+.1%} from {a}'s"
    if min(len(a_values), len(b_values)) < 2:
        return [f"{sentence}; one run each tells nothing of their spread"]
    apart = f"{column.title}: {a} and {b} differ, their spreads do not overlap"
    return [sentence, *(not_significant(groups, column) or [apart])]


def notes(result: StudyResult[BackendOptions]) -> list[str]:
    """Return what memory means here, and a verdict for each pair of backends."""
    sentences = [result.memory_note()]
    groups = list(result.groups.items())
    for pair in zip(groups[::2], groups[1::2], strict=True):
        sentences += verdict(dict(pair), COLUMNS[0])
    return sentences


COLUMNS = (
    Column("training s", "train_time_s", ".2f", spread=True),
    Column("update ms/step", "update_s", ".2f", 1e3, spread=True),
    Column("images/s", "images_per_s", ",.0f"),
    AVERAGE_MEMORY,
    PEAK_MEMORY,
    ACCURACY,
)
STUDY = Study(
    options=BackendOptions,
    cells=cells,
    columns=COLUMNS,
    notes=notes,
    title=lambda result: result.title(f"{result.rows.world_size.iloc[0]:.0f} processes"),
    draw=partial(draw, [COLUMNS[:1], COLUMNS[1:2]]),
)
