"""The columns of summary.csv and steps.csv, in order; docs/metrics.md defines each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1

SUMMARY_COLUMNS = (
    "schema_version run_id timestamp status error recipe engine engine_version model n_params seq_len vocab_size precision "
    "world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps global_batch_size steps warmup_steps tokens_total "
    "activation_checkpointing compile offload data seed loss_first loss_last step_time_s_median step_time_s_p10 "
    "step_time_s_p90 tokens_per_s tokens_per_s_per_device tflops_per_device mfu mfu_palm hfu handout_tflops "
    "peak_mem_allocated_gib peak_mem_reserved_gib peak_rss_gib data_wait_fraction device device_peak_tflops "
    "host torch_version git_commit workload_hash"
).split()
STEP_COLUMNS = "step tokens loss grad_norm lr step_time_s data_wait_s".split()
STATUSES = ("ok", "oom", "failed", "interrupted")

# Text that a spreadsheet would run as a formula (OWASP: CSV injection).
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def cell(value: Any) -> str:
    """One CSV cell: numbers so that they read back exactly, None as empty, text on one line and never a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return "'" + text if str(value).startswith(FORMULA_STARTS) else text


def summary_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a summary row; what it lacks stays empty, what the schema lacks is a ValueError."""
    unknown = set(row) - set(SUMMARY_COLUMNS)
    if unknown or row.get("status") not in STATUSES:
        raise ValueError(f"not columns of the summary: {sorted(unknown)}; status {row.get('status')!r}")
    return [cell({"schema_version": SCHEMA_VERSION, **row}.get(column)) for column in SUMMARY_COLUMNS]
