"""The columns of summary.csv and steps.csv, in order. docs/guides/metrics.md defines each."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

SCHEMA_VERSION = 7

SUMMARY_COLUMNS = (
    "schema_version run_id timestamp status error recipe engine engine_version model n_params seq_len vocab_size precision "
    "world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps global_batch_size steps warmup_steps tokens_total "
    "activation_checkpointing compile optimizer_state offload data seed loss_first loss_last step_time_s_median "
    "step_time_s_p10 step_time_s_p90 train_time_s tokens_per_s tokens_per_s_per_device tflops_per_device mfu mfu_palm hfu "
    "handout_tflops fp8_tflops_per_device fp8_mixed_utilisation peak_mem_allocated_gib peak_mem_reserved_gib peak_rss_gib "
    "state_weights_gib state_gradients_gib state_optimizer_gib state_host_gib state_disk_gib state_formula state_formula_gib "
    "gpu_util_percent data_wait_fraction offload_cpu_gib offload_disk_gib offload_read_gib_per_s offload_write_gib_per_s "
    "offload_wait_fraction bubble_fraction bubble_fraction_theory device device_peak_tflops host torch_version git_commit "
    "workload_hash slowest_rank slowest_rank_ratio skipped_spikes bound_by bound_share gain_if_removed late_rank taken_fraction "
    "predicted_step_time_s predicted_peak_mem_gib plan_hash"
).split()
NEW_IN_6 = ("bound_by", "bound_share", "gain_if_removed", "late_rank", "taken_fraction", "predicted_", "plan_hash")
NEW_IN_7 = ("train_time_s", "state_", "gpu_util_percent")
# What version 1 lacks. docs/guides/metrics.md says which later version lacks what.
NEW_SINCE_1 = [
    column
    for column in SUMMARY_COLUMNS
    if column.startswith(
        ("offload_", "bubble_", "fp8_", "optimizer_state", "slowest_rank", "skipped_", *NEW_IN_6, *NEW_IN_7)
    )
]
STEP_COLUMNS = "step tokens loss grad_norm lr step_time_s data_wait_s".split()
STATUSES = ("ok", "oom", "failed", "interrupted")

# What a spreadsheet runs as a formula (OWASP, CSV injection; CWE-1236).
FORMULA_STARTS = tuple("=+-@\t\r")


def cell(value: Any) -> str:
    """Write a value as a CSV cell.

    Numbers read back exactly, None is empty, text is on one line and never a formula.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        # The shortest digits that read back as the same float.
        return repr(float(value))
    text = "".join(c if c.isprintable() else " " for c in str(value))
    dangerous = str(value).startswith(FORMULA_STARTS) or text.lstrip().startswith(FORMULA_STARTS)
    return "'" + text if dangerous else text


def summary_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a summary row, empty for columns that it lacks.

    Raises ValueError for a key that is no column, and for an unknown status.
    """
    if unknown := set(row) - set(SUMMARY_COLUMNS):
        raise ValueError(f"not columns of the summary: {sorted(unknown)}")
    if row.get("status") not in STATUSES:
        raise ValueError(f"status {row.get('status')!r} is none of {STATUSES}")
    return [cell({"schema_version": SCHEMA_VERSION, **row}.get(column)) for column in SUMMARY_COLUMNS]
