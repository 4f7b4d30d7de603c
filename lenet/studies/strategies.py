"""`gptscale lenet strategies`: one process, DataParallel, DDP and Lightning Fabric on the same work, with equal loaders.

Report B (docs/lenet/README.md) credited DDP with a speed-up that came from worker processes, since DDP had 4 of them and the
baseline none. Here a grid whose strategies load in different ways is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import parse_names
from gptscale.lenet.studies.bars import draw_bars
from gptscale.lenet.studies.reference_figures import STRATEGY_RUNS
from gptscale.lenet.studies.study import (
    Cell,
    Column,
    Study,
    StudyOptions,
    StudyResult,
    not_significant,
    of,
    run_study,
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
        if self.strategies != "auto":
            return parse_names(self.strategies, NAMES, "strategy", "--strategies")
        # Imported here, so that help and a refused option need no torch.
        import torch

        return [name for name in NAMES if name != "dataparallel" or torch.cuda.device_count() > 1]

    @property
    def workers(self) -> int:
        """The number of workers that every strategy has.

        Raises ConfigError if the numbers differ.
        """
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


def grid(options: StrategiesOptions) -> list[Cell]:
    """Return cells of each strategy, with one process and, where the strategy can have several, with `nproc`."""
    shared: dict[str, Any] = {"model": options.model, "batch_size": options.batch_size, "loader": options.loader}
    shared |= {"num_workers": options.workers}
    cells = []
    for name in options.names:
        for nproc in (1,) if name in ("single", "dataparallel") else sorted({1, options.nproc}):
            cells.append(Cell(f"{name} x{nproc}", shared | {"strategy": name}, nproc))
    return cells


def reference_rows(options: StrategiesOptions) -> list[dict[str, str]]:
    """Return the runs of report B in the columns of this study."""
    return [
        {"run": f"report B: {name}", "workers": str(n), "training s": f"{s:.1f}", "accuracy %": f"{accuracy:.2f}"}
        for name, n, s, accuracy in STRATEGY_RUNS
    ]


def notes(result: StudyResult[StrategiesOptions]) -> list[str]:
    """Return the pairs whose training times do not differ, and a word about a strategy that was left out."""
    sentences = not_significant(result.groups, COLUMNS[2])
    if "dataparallel" not in result.options.names:
        sentences.append("dataparallel was not run: it needs two or more GPUs")
    return sentences


COLUMNS = (
    Column("processes", of("world_size"), ".0f"),
    Column("workers", of("num_workers"), ".0f"),
    Column("training s", of("train_time_s"), ".1f", spread=True),
    Column("images/s", of("images_per_s"), ",.0f", spread=True),
    Column("last loss", of("loss_last"), ".4f"),
    Column("accuracy %", of("test_accuracy", 100), ".2f", spread=True),
    Column("host GiB", of("peak_rss_gib"), ".2f"),
)
STUDY = Study(
    name="strategies",
    about="Strategies on equal terms.",
    options=StrategiesOptions,
    cells=grid,
    columns=COLUMNS,
    reference_rows=reference_rows,
    notes=notes,
    title=lambda result: result.title(result.options.model, f"global batch {result.options.batch_size}"),
    draw=partial(draw_bars, [COLUMNS[2], COLUMNS[5]]),
)


def main(argv: Sequence[str]) -> int:
    """Run the study."""
    return run_study(STUDY, argv)
