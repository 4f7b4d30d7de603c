"""The TensorBoard events of a run written anew from its CSVs, which have all of them when events were cut or damaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from gptscale.common.errors import DataError
from gptscale.results.record.board import Board

# Of each CSV of a run the columns that are scalars, and how their tags begin. A vision run has other columns, and epochs.
SCALARS = {
    "steps.csv": ("train", ("loss", "grad_norm", "lr")),
    "eval.csv": ("eval", ("loss",)),
    "epochs.csv": ("epoch", ("train_loss", "test_loss", "test_accuracy", "images_per_s")),
}
# The highest that an event can have.
STEP_MAX = 2**63 - 1


def rebuild_events(folder: Path) -> int:
    """Write the events of the run in `folder` from its CSVs, set the old ones aside, and return how many rows were taken.

    Memory is no column of a CSV, and its curve ends with the old events. Raises DataError for rows that are damaged.
    """
    rows = [point for name in SCALARS if (folder / name).is_file() for point in points(folder / name)]
    old = sorted(folder.glob("*.tfevents.*"))
    board = Board(folder)
    for step, scalars in rows:
        board.scalars(step, scalars)
    board.close()
    for path in old:
        # TensorBoard reads each file with "tfevents" in its name.
        path.rename(path.with_name(path.name.replace("tfevents", "discarded")))
    return len(rows)


def points(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the step and the scalars of each row of a run's CSV."""
    prefix, columns = SCALARS[path.name]
    # A damaged byte becomes a character that no number has.
    with path.open(errors="replace") as file:
        names = file.readline().rstrip("\n").split(",")
        for number, line in enumerate(file, start=2):
            try:
                cells = line.rstrip("\n").split(",")
                if len(cells) != len(names):
                    raise ValueError(f"{len(cells)} cells in place of {len(names)}")
                row = dict(zip(names, cells, strict=True))
                step = int(row["step"])
                if not 0 < step <= STEP_MAX:
                    raise ValueError(f"step {step} is out of range")
                scalars = {f"{prefix}/{column}": float(row[column]) for column in columns if row.get(column)}
                yield step, scalars | _speed(row)
            except (KeyError, ValueError) as error:
                what = f"line {number} is no row ({str(error)[:100]})"
                raise DataError(what, f"in {path}", "resume the run, which sets such lines aside") from None


def _speed(row: Mapping[str, str]) -> dict[str, float]:
    if not (row.get("tokens") and row.get("step_time_s")):
        return {}
    step_time_s = float(row["step_time_s"])
    return {"train/tokens_per_s": float(row["tokens"]) / int(row["step"]) / step_time_s if step_time_s else math.nan}
