"""The columns of lenet.csv, steps.csv and epochs.csv, and reading the rows of lenet.csv."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd

from gptscale.common.errors import ConfigError
from gptscale.common.settings.user_file import read_table
from gptscale.results.columns import RunColumn, RunTable

# Version 1 had no backend, loss_scale, skipped_steps and no columns of the usage sampler. Version 2 had no verdicts.
NEW_IN_3 = ("bound_by", "gain_if_removed", "taken_fraction")
SUMMARY_NAME = "lenet.csv"
# Largest CSV of rows that is read.
FILE_BYTES_MAX = 2**28

# class_accuracy holds fractions with blanks between, in the order of the classes, and `-` for a class without test images.
SUMMARY_COLUMNS = (
    "schema_version run_id timestamp status error study variant model operators gelu n_params batch_norm data n_train "
    "n_test image_size augment loader num_workers strategy backend precision amp loss_scale channels_last world_size batch_size "
    "epochs steps optimizer lr lr_schedule weight_decay label_smoothing seed loss_first loss_last skipped_steps test_loss "
    "test_accuracy best_test_accuracy class_accuracy seconds_to_99 seconds_to_99_4 data_time_s train_time_s eval_time_s "
    "total_time_s load_s update_s load_fraction images_per_s images_per_s_per_device avg_mem_gib peak_mem_allocated_gib "
    "peak_mem_reserved_gib peak_rss_gib gpu_util_percent gpu_mem_used_gib power_w cpu_util_percent bound_by gain_if_removed "
    "taken_fraction device threads host "
    "torch_version git_commit workload_hash"
).split()
STEP_COLUMNS = "step epoch loss lr load_s update_s skipped".split()
EPOCH_COLUMNS = (
    "epoch step train_loss test_loss test_accuracy class_accuracy train_time_s eval_time_s images_per_s".split()
)
# First steps that are left out of times, because of caches, the allocator and the first choice of kernels.
WARMUP_STEPS = 3
# Quantiles of a run's steps, loading included, without the first ones. They are what a mean is not: blind to a short disturbance.
TIME_COLUMNS = "p10_ms median_ms p90_ms".split()
TEXT = (
    "run_id timestamp status error study variant model operators gelu batch_norm data augment loader strategy backend precision "
    "amp loss_scale channels_last optimizer lr_schedule class_accuracy bound_by device host torch_version git_commit "
    "workload_hash"
).split()


LENET = RunTable(
    SUMMARY_NAME,
    tuple(
        RunColumn(name, str if name in TEXT else float, since=3 if name in NEW_IN_3 else 1) for name in SUMMARY_COLUMNS
    ),
)


def read_summary(path: Path) -> pd.DataFrame:
    """Return all complete rows of a lenet.csv, with numbers as numbers, or raise ConfigError for another file."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", "in the results", "run `gptscale lenet train` first")

    def refuse(reason: str) -> ConfigError:
        return ConfigError(f"{path} is none of gptscale lenet's ({reason})", "in the results", "give a lenet.csv")

    text = read_table(path, FILE_BYTES_MAX, refuse)
    try:
        rows = pd.read_csv(io.StringIO(text[: text.rfind("\n") + 1]), dtype=str, keep_default_na=False)
        rows = rows.reindex(columns=[*rows.columns, *(c for c in NEW_IN_3 if c not in rows)], fill_value="")
        numbers = [column for column in SUMMARY_COLUMNS if column not in TEXT]
        rows[numbers] = rows[numbers].replace("nan", "").apply(pd.to_numeric)
    except (ValueError, KeyError) as error:
        raise refuse(str(error).splitlines()[0][:100]) from None
    return rows


def fractions(values: list[float | None]) -> str:
    """Return per-class accuracies as one cell."""
    return " ".join("-" if v is None else f"{v:.4f}" for v in values)
