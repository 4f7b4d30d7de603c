"""The lines of the tables of `gptscale bench parts`: each way's times, and its rates beside the ceilings of the same run."""

from __future__ import annotations

from typing import Any

from gptscale.launchers.bench.measurement import or_dash

TITLES = ("forward ms", "both ms", "of first", "GiB", "GB/s", "of copy", "TFLOP/s", "of product", "error")


def heading(shared: dict[Any, Any]) -> str:
    """Return the machine, the shape and the ceilings, in two lines."""
    c = shared
    return (
        f"{c['device']}, torch {c['torch_version']}, {c['threads']} threads, {c['dtype']}\n"
        f"hidden {c['hidden']}, {c['heads']} heads, sequence {c['seq_len']}, vocabulary {c['vocab_size']}, batch "
        f"{c['batch_size']}; copy {c['copy_gb_per_s']:,.1f} GB/s, product {c['product_tflops']:.4g} TFLOP/s\n"
    )


def cells(row: dict[Any, Any]) -> list[str]:
    """Return the line of a way: its name, and its figures or why there are none."""
    if row["failure"]:
        return [row["way"], row["failure"]]
    figures = [
        (row["forward_ms"], ",.3f"),
        (row["both_ms"], ",.3f"),
        (row["over_first"], ".3f"),
        (row["peak_gib"], ".3f"),
    ]
    for rate, ceiling in (("gb_per_s", "copy_gb_per_s"), ("tflops", "product_tflops")):
        share = None if row[rate] is None else row[rate] / row[ceiling]
        figures += [(row[rate], ".4g"), (share, ".0%")]
    return [row["way"], *(or_dash(value, form) for value, form in [*figures, (row["error"], ".1e")])]
