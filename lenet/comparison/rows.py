"""The measured rows of a study as CSVs: FILE.csv has a row per run, FILE-epochs.csv a row per epoch of each run.

FILE-times.csv has quantiles of the time of a run's steps, and FILE-windows.csv, of report A's settings alone, means of losses.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from gptscale.common.errors import ConfigError
from gptscale.common.settings.user_file import read_table
from gptscale.lenet.run.columns import EPOCH_COLUMNS, FILE_BYTES_MAX, LENET, TIME_COLUMNS, WARMUP_STEPS, read_summary

# Report A gave mean losses of each 200 batches (docs/lenet/README.md).
BATCHES = 200
WINDOW_COLUMNS = "epoch window loss".split()
# These tell whose epoch, or whose times, a row is.
RUN_COLUMNS = ["run_id", "variant", "seed"]
# Columns of words in such files.
WORDS = "class_accuracy net way data device torch_version".split()
DETAILS = {"epochs": EPOCH_COLUMNS, "times": TIME_COLUMNS, "windows": WINDOW_COLUMNS}


class MeasuredRows(NamedTuple):
    """The rows of runs, those of their epochs, of the times of their steps, and of losses over windows of steps."""

    runs: pd.DataFrame
    epochs: pd.DataFrame
    times: pd.DataFrame
    windows: pd.DataFrame


def rows_of_runs(out: Path, runs: pd.DataFrame) -> MeasuredRows:
    """Return the rows of `runs` with what their folders in `out` have of them."""
    details = []
    for kind, columns in DETAILS.items():
        frames = []
        for row in runs[RUN_COLUMNS].to_dict("records"):
            # Report A alone gives losses of windows.
            if kind == "windows" and not str(row["variant"]).startswith("report_a"):
                continue
            detail = _detail(out / "runs" / str(row["run_id"]), kind)
            if detail is not None:
                frames.append(detail.assign(**{str(name): cell for name, cell in row.items()}))
        details.append(_joined(kind, frames)[[*RUN_COLUMNS, *columns]])
    return MeasuredRows(runs, *details)


def write_rows(csv: Path, rows: MeasuredRows) -> list[Path]:
    """Write the files and return their paths."""
    rows.runs.to_csv(csv, index=False, columns=LENET.names)
    written = [csv]
    for kind, frame in zip(DETAILS, rows[1:], strict=True):
        if not frame.empty:
            written.append(beside(csv, kind))
            frame.to_csv(written[-1], index=False)
    return written


def read_rows(files: str, study: str) -> MeasuredRows:
    """Return what was written to CSVs, which `files` names with commas between.

    Raises ConfigError for a file without rows of `study`.
    """
    runs: list[pd.DataFrame] = []
    details: dict[str, list[pd.DataFrame]] = {kind: [] for kind in DETAILS}
    for file in map(Path, files.split(",")):
        frame = read_summary(file)
        if frame.empty or not (frame.study == study).all():
            raise ConfigError(f"{file} has no rows of {study} alone", "in --rows", "give what its --csv wrote")
        runs.append(frame)
        for kind, frames in details.items():
            if beside(file, kind).is_file():
                of_file = read_details(beside(file, kind), [*DETAILS[kind], "seed"])
                # The first files of windows have the seed alone.
                frames.append(of_file.merge(frame[RUN_COLUMNS], on=[name for name in RUN_COLUMNS if name in of_file]))
    every = pd.concat(runs, ignore_index=True).drop_duplicates("run_id")
    return MeasuredRows(every, *(_joined(kind, frames) for kind, frames in details.items()))


def read_details(file: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Return the rows of a CSV, or raise ConfigError if it is none, or lacks one of the columns or a number in one."""

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{file} has no rows of a study ({reason})", "in --rows", "give what its --csv wrote")

    try:
        rows = pd.read_csv(io.StringIO(read_table(file, FILE_BYTES_MAX, refuse)))
        if rows.empty or not {*columns} <= {*rows}:
            raise refuse("other columns, or none")
        numbers = [name for name in columns if name not in WORDS]
        rows[numbers] = rows[numbers].apply(pd.to_numeric)
    except ValueError as error:
        raise refuse(str(error).splitlines()[0][:100]) from None
    return rows


def beside(csv: Path, kind: str) -> Path:
    """Return the path of the file of `epochs` or of `times` beside a CSV of runs."""
    return csv.with_name(f"{csv.stem}-{kind}.csv")


def window_losses(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss of each 200 batches of a run, by epoch, as its `steps` have it.

    The last batches of an epoch, fewer than 200, are in no mean, as in report A.
    """
    window = steps.groupby("epoch").cumcount() // BATCHES
    means = steps.groupby(["epoch", window.rename("window")]).loss.agg(["mean", "size"])
    return means.loc[means["size"] == BATCHES, "mean"].rename("loss").reset_index()


def _detail(folder: Path, kind: str) -> pd.DataFrame | None:
    """Return the rows of one kind that a run's folder has, or None if it has none."""
    file = folder / ("epochs.csv" if kind == "epochs" else "steps.csv")
    if not file.is_file():
        return None
    rows = pd.read_csv(file)
    if kind == "epochs":
        return rows
    if kind == "windows":
        return window_losses(rows)
    ms = 1e3 * (rows.load_s + rows.update_s)[WARMUP_STEPS:]
    return pd.DataFrame([ms.quantile([0.1, 0.5, 0.9]).tolist()], columns=TIME_COLUMNS)


def _joined(kind: str, frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    if full := [frame for frame in frames if not frame.empty]:
        return pd.concat(full, ignore_index=True).drop_duplicates()
    return pd.DataFrame(columns=[*RUN_COLUMNS, *DETAILS[kind]])
