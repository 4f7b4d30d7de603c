"""The columns of lenet.csv, one row of columns.csv for each, and reading the rows of lenet.csv."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from gptscale.common.errors import ConfigError
from gptscale.common.settings.user_file import read_table
from gptscale.results.columns import RunTable, read_columns

LENET = RunTable("lenet.csv", read_columns(Path(__file__).with_name("columns.csv")))
# Runs that differ in the first did other work. Runs of the same work that differ in the second are compared with each other.
WORK, CONFIGURATION = (
    [column.name for column in LENET.columns if column.source == source] for source in ("work", "configuration")
)
# Largest CSV of rows that is read.
FILE_BYTES_MAX = 2**28
STEP_COLUMNS = "step epoch loss lr load_s update_s skipped".split()
EPOCH_COLUMNS = (
    "epoch step train_loss test_loss test_accuracy class_accuracy train_time_s eval_time_s images_per_s".split()
)
# First steps that are left out of times, because of caches, the allocator and the first choice of kernels.
WARMUP_STEPS = 3
# Quantiles of a run's steps, loading included, without the first ones. They are what a mean is not: blind to a short disturbance.
TIME_COLUMNS = "p10_ms median_ms p90_ms".split()


def read_summary(path: Path) -> pd.DataFrame:
    """Return all complete rows of a lenet.csv, with numbers as numbers, or raise ConfigError for another file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", "in the results", "run `gptscale lenet train` first")

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{path} is none of gptscale lenet's ({reason})", "in the results", "give a lenet.csv")

    text = read_table(path, FILE_BYTES_MAX, refuse)
    try:
        rows = pd.read_csv(io.StringIO(text[: text.rfind("\n") + 1]), dtype=str, keep_default_na=False)
        if missing := LENET.missing(rows.columns):
            raise refuse(f"it has no column {missing[0]}")
        new = [column.name for column in LENET.columns if column.since > 1 and column.name not in rows]
        before = {column.name: {"": column.before} for column in LENET.columns if column.before}
        rows, numbers = rows.reindex(columns=[*rows.columns, *new], fill_value="").replace(before), LENET.of_type(float)
        rows[numbers] = rows[numbers].replace("nan", "").apply(pd.to_numeric)
    except ValueError as error:
        raise refuse(str(error).splitlines()[0][:100]) from None
    return rows
