"""`gptscale lenet strategies`: one process, DataParallel, DDP and Lightning Fabric on the same work, with equal loaders.

The text credited DDP with a speed-up that came from its worker processes: it compared 4 of them with none. Here a grid whose
strategies do not load alike is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import did_you_mean
from gptscale.common.settings.command_line import parse
from gptscale.lenet.studies.bars import draw_bars
from gptscale.lenet.studies.reference_figures import STRATEGIES as OLD
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
)

NAMES = ("single", "dataparallel", "ddp", "fabric")


@dataclass(frozen=True)
class StrategiesOptions(StudyOptions):
    """The same images, batch and loader by every strategy."""

    strategies: str = "auto"
    """single, dataparallel, ddp, fabric with commas between; auto leaves out what this machine cannot run."""
    nproc: int = 2
    """Processes of ddp and fabric, which also run with one; the global batch stays."""
    batch_size: int = 64
    """Images per step over all processes."""
    model: str = "lenet"
    """As in gptscale lenet train."""
    loader: Literal["fast", "dataloader"] = "fast"
    """As in gptscale lenet train."""
    num_workers: str = "0"
    """Worker processes of every process's loader; `single=0,ddp=4` is understood, and refused as unfair."""

    @property
    def names(self) -> list[str]:
        """The strategies to run."""
        if self.strategies == "auto":
            return [name for name in NAMES if name != "dataparallel" or torch.cuda.device_count() > 1]
        for name in self.strategies.split(","):
            if name not in NAMES:
                raise ConfigError(f"unknown strategy {name!r}", "in --strategies", did_you_mean(name, NAMES))
        return self.strategies.split(",")

    @property
    def workers(self) -> int:
        """The number of workers that all share; ConfigError if they do not."""
        words = [word.split("=") for word in self.num_workers.split(",")]
        if not all(word[-1].isdecimal() and len(word) <= 2 for word in words):
            raise ConfigError(f"{self.num_workers!r} is no number", "in --num-workers", "use for example 2")
        numbers = {int(word[-1]) for word in words}
        if len(numbers) > 1:
            raise ConfigError(
                f"unequal worker processes ({self.num_workers}) would be compared, not strategies",
                "in --num-workers",
                "give all the same number; `gptscale lenet workers` tells what workers alone buy",
            )
        return numbers.pop()


COLUMNS = (
    Column("processes", of("world_size"), ".0f"),
    Column("workers", of("num_workers"), ".0f"),
    Column("training s", of("train_time_s"), ".1f", spread=True),
    Column("images/s", of("images_per_s"), ",.0f", spread=True),
    Column("last loss", of("loss_last"), ".4f"),
    Column("accuracy %", of("test_accuracy", 100), ".2f", spread=True),
    Column("host GiB", of("peak_rss_gib"), ".2f"),
)


def grid(options: StrategiesOptions) -> list[Cell]:
    """Each strategy, those that can with one process and with `nproc`."""
    same: dict[str, Any] = {"model": options.model, "batch_size": options.batch_size, "loader": options.loader}
    same |= {"num_workers": options.workers}
    cells = []
    for name in options.names:
        for nproc in (1,) if name in ("single", "dataparallel") else sorted({1, options.nproc}):
            cells.append(Cell(f"{name} x{nproc}", same | {"strategy": name}, nproc))
    return cells


def old_rows(titles: Sequence[str]) -> list[dict[str, str]]:
    """The text's rows in the columns of ours."""
    return [
        dict.fromkeys(titles, "-")
        | {"run": f"text B: {name}", "workers": str(n), "training s": f"{s:.1f}", "accuracy %": f"{accuracy:.2f}"}
        for name, n, s, accuracy in OLD
    ]


def main(argv: Sequence[str]) -> int:
    """Run the grid, print the table, write the files."""
    options = parse(StrategiesOptions, argv, prog="gptscale lenet strategies", about="Strategies on equal terms.")
    cells = grid(options)
    rows = run_grid("strategies", cells, options)
    groups = grouped(rows, cells)
    lines = table(groups, COLUMNS)
    title = f"{options.model} on {rows.data.iloc[0]}, global batch {options.batch_size}, {rows.device.iloc[0]}"
    notes = not_significant(groups, COLUMNS[2])
    if "dataparallel" not in options.names:
        notes.append("dataparallel was not run: it needs two or more GPUs")
    finish(
        "strategies",
        options,
        rows,
        [*lines, *old_rows(list(lines[0]))],
        notes,
        lambda path: draw_bars(groups, [COLUMNS[2], COLUMNS[5]], title, path),
    )
    return 0
