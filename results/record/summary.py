"""The lines that end a run: its row of the summary, for a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def print_summary(row: dict[str, Any], csv: Path, folder: Path) -> None:
    """Print the block of lines that ends a run."""

    def shown(key: str, form: str, unit: str = "") -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:{form}}{unit}"

    speed = "not timed: the first steps are warm-up (--timing-warmup-steps)"
    if row.get("tokens_per_s") is not None:
        speed = (
            f"{shown('tokens_per_s', ',.0f')} tokens/s, step {_ms(row, 'median')} ms (p10 {_ms(row, 'p10')}, "
            f"p90 {_ms(row, 'p90')}), "
        )
        if row["precision"] == "fp8":
            rate, share = shown("fp8_tflops_per_device", ".3f"), shown("fp8_mixed_utilisation", ".1%")
            speed += f"fp8 {rate} TFLOP/s per device as bf16 counts, mixed peak {share}"
        else:
            speed += f"{shown('tflops_per_device', '.3f')} TFLOP/s per device, MFU {shown('mfu', '.1%')}"
    if row.get("train_time_s") is not None:
        speed += f"\n  time    {shown('train_time_s', ',.1f', ' s')} in training steps"
    optional = _state(row)
    if row.get("offload_wait_fraction") is not None:
        waiting = shown("offload_wait_fraction", ".1%")
        optional += f"  offload {waiting} of the step waiting for what is on the host or on disk"
        if row["offload_disk_gib"]:
            speeds = [shown(f"offload_{way}_gib_per_s", ".2f", " GiB/s") for way in ("read", "write")]
            optional += f" (read {speeds[0]}, write {speeds[1]})"
        optional += "\n"
    if row.get("bubble_fraction") is not None:
        idle, theory = shown("bubble_fraction", ".1%"), shown("bubble_fraction_theory", ".1%")
        optional += f"  bubble  {idle} of the ranks' time in the pipeline, {theory} in theory\n"
    print(
        f"\n{row['recipe']} {row['status']}: loss {shown('loss_first', '.4f')} -> {shown('loss_last', '.4f')}\n"
        f"  speed   {speed}\n"
        f"  memory  peak allocated {shown('peak_mem_allocated_gib', '.2f', ' GiB')}, "
        f"reserved {shown('peak_mem_reserved_gib', '.2f', ' GiB')}, host {shown('peak_rss_gib', '.2f', ' GiB')}\n"
        f"{optional}"
        f"  files   {folder}\n"
        f"  row     {csv}    (gptscale compare {csv.parent})",
        flush=True,
    )


def _state(row: dict[str, Any]) -> str:
    """Return the line on what a rank holds of the model's state, empty if it was not measured."""
    if row.get("state_weights_gib") is None:
        return ""
    names = {name: name for name in ("weights", "gradients", "optimizer")} | {"host": "on the host", "disk": "on disk"}
    parts = [f"{words} {as_size(gib)}" for place, words in names.items() if (gib := row[f"state_{place}_gib"])]
    formula = ""
    if row.get("state_formula"):
        formula = f"    ({row['state_formula']} = {as_size(row['state_formula_gib'])})"
    return f"  state   {', '.join(parts)} a rank at most{formula}\n"


def _ms(row: dict[str, Any], which: str) -> str:
    return f"{row[f'step_time_s_{which}'] * 1e3:,.1f}"


def as_size(gib: float) -> str:
    """Return GiB with three digits, as MiB or KiB where that is less than one."""
    if not gib:
        return "0"
    for unit in ("GiB", "MiB"):
        if gib >= 1:
            return f"{gib:,.3g} {unit}" if gib < 1000 else f"{gib:,.0f} {unit}"
        gib *= 1024
    return f"{gib:.3g} KiB"
