"""`gptscale lenet strategies`: one process, DataParallel, DDP, Fabric and the Trainer, with equal work and loaders.

Report B (docs/lenet/README.md) credited DDP with a speed-up that came from worker processes, since DDP had 4 of them and the
baseline none. Here a grid whose strategies load in different ways is refused. Report A found Lightning's Trainer slower, for
reasons that it did not know. Here the time that each strategy adds to a step is a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import parse_names
from gptscale.lenet.comparison.tables import (
    ACCURACY,
    BUSY,
    RUNS,
    Column,
    as_fast_as_the_first,
    class_table,
    loss_table,
    spread,
)
from gptscale.lenet.run.config import Precision, VisionConfig
from gptscale.lenet.studies.grid import Cell
from gptscale.lenet.studies.study import Lines, Study, StudyOptions, StudyResult, draw

NAMES = ("single", "dataparallel", "ddp", "fabric", "trainer_bare", "trainer")
REPORTS = [RUNS[name] for name in ("affine", "ddp", "dataparallel")]


@dataclass(frozen=True)
class StrategiesOptions(StudyOptions):
    """The same images, batch and loader by every strategy."""

    strategies: str = "auto"
    """single, dataparallel, ddp, fabric, trainer_bare, trainer with commas between; auto: all that this machine can run."""
    nproc: int = 2
    """Processes of ddp, fabric and the Trainer, which also run with one; the global batch stays."""
    batch_size: int = 64
    """Images per step over all processes."""
    model: str = "lenet"
    """As in gptscale lenet train."""
    precision: Precision = "fp32"
    """As in gptscale lenet train."""
    loader: Literal["fast", "dataloader"] = "fast"
    """As in gptscale lenet train."""
    num_workers: str = "0"
    """Worker processes of every process's loader; `single=0,ddp=4` is understood, and refused as unfair."""

    @property
    def names(self) -> list[str]:
        if self.strategies != "auto":
            return parse_names(self.strategies, NAMES, "strategy", "--strategies")
        return [name for name in NAMES if not why_not(name, self)]

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
            what = f"unequal worker processes ({self.num_workers}) would be compared, not strategies"
            fix = "give all the same number; `gptscale lenet workers` tells what workers alone buy"
            raise ConfigError(what, "in --num-workers", fix)
        return numbers.pop()


def why_not(name: str, options: StrategiesOptions) -> str | None:
    """Return why this machine cannot run a strategy with these options, or None if it can."""
    # Imported here, so that help and a refused option need no torch.
    from gptscale.lenet.run.preflight import world_from_environment
    from gptscale.lenet.run.strategy import check_strategy

    config = VisionConfig(strategy=name, device=options.device, precision=options.precision)  # type: ignore[arg-type]
    try:
        check_strategy(config, world_from_environment(config))
    except ConfigError as error:
        return error.what
    return None


def grid(options: StrategiesOptions) -> list[Cell]:
    """Return cells of each strategy, with one process and, where the strategy can have several, with `nproc`."""
    shared: dict[str, Any] = {"model": options.model, "batch_size": options.batch_size, "loader": options.loader}
    shared |= {"num_workers": options.workers, "precision": options.precision}
    cells = []
    for name in options.names:
        for nproc in (1,) if name in ("single", "dataparallel") else sorted({1, options.nproc}):
            cells.append(Cell(f"{name} x{nproc}", shared | {"strategy": name}, nproc))
    return cells


def step_table(result: StudyResult[StrategiesOptions]) -> Lines:
    """Return a line for each variant with the median step of its runs, and what it adds to that of one plain process.

    The difference is taken within a turn, since the machine may be slower in another.
    """
    times = result.measured.times
    plain = times[times.variant == "single x1"].set_index("seed").median_ms
    lines = []
    for variant in result.groups:
        rows = times[times.variant == variant].set_index("seed")
        if rows.empty:
            continue
        line = {"run": variant, "median step, ms": spread(rows.median_ms, ".2f")}
        line["9 of 10 steps below, ms"] = spread(rows.p90_ms, ".2f")
        added = (rows.median_ms - plain).dropna()
        is_compared = variant != "single x1" and not added.empty
        line["added to a plain step, ms"] = spread(added, ".2f", " to ") if is_compared else "-"
        lines.append(line)
    return lines


def notes(result: StudyResult[StrategiesOptions]) -> list[str]:
    """Return the strategies as fast as the first one, and why others were left out."""
    sentences = as_fast_as_the_first(result.groups, TRAINING)
    if not result.options.rows:
        left_out = [name for name in NAMES if name not in result.options.names]
        sentences += [f"{name} was not run: {why}" for name in left_out if (why := why_not(name, result.options))]
    return sentences


TRAINING = Column("training s", "train_time_s", ".1f", spread=True)
COLUMNS = (
    Column("processes", "world_size", ".0f"),
    Column("workers", "num_workers", ".0f"),
    TRAINING,
    Column("images/s", "images_per_s", ",.0f", spread=True),
    Column("last loss", "loss_last", ".4f"),
    ACCURACY,
    BUSY,
    Column("host GiB", "peak_rss_gib", ".2f"),
)
STUDY = Study(
    options=StrategiesOptions,
    cells=grid,
    columns=COLUMNS,
    notes=notes,
    title=lambda result: result.title(f"global batch {result.rows.batch_size.iloc[0]}"),
    draw=partial(draw, [[TRAINING], [COLUMNS[3]], [ACCURACY]], reports=REPORTS),
    # The cost of each strategy in a step, loss by epoch, and accuracy by class.
    more_tables=lambda r: [step_table(r), loss_table(r.curves, REPORTS), class_table(r.groups, REPORTS)],
)
