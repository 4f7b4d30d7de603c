"""What `gptscale bench parts` says: a table for each part, its rates beside the ceilings of the same run."""

from __future__ import annotations

from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table


def show(frame: pd.DataFrame, circumstances: dict[str, Any]) -> None:
    """The table of each part."""
    c, console = circumstances, Console(width=None if Console().is_terminal else 125, highlight=False, markup=False)
    console.print(f"{c['device']}, torch {c['torch_version']}, {c['threads']} threads, {c['dtype']}")
    console.print(
        f"hidden {c['hidden']}, {c['heads']} heads, sequence {c['seq_len']}, vocabulary {c['vocab_size']}, batch "
        f"{c['batch_size']}; copy {c['copy_gb_per_s']:,.1f} GB/s, product {c['product_tflops']:.4g} TFLOP/s\n"
    )
    titles = ("forward ms", "both ms", "of first", "GiB", "GB/s", "of copy", "TFLOP/s", "of product", "error")
    for part, rows in frame.groupby("part", sort=False):
        table = Table(str(part), *titles, box=None, pad_edge=False)
        for row in rows.to_dict("records"):
            table.add_row(row["way"], *([row["failure"]] if row["failure"] else cells(row, c)))
        console.print(table, "")


def cells(row: dict[Any, Any], circumstances: dict[str, Any]) -> list[str]:
    """A row of the table behind its name."""

    def said(value: float | None, form: str) -> str:
        return "-" if value is None or pd.isna(value) else format(value, form)

    shares = {"gb_per_s": "copy_gb_per_s", "tflops": "product_tflops"}
    found = [said(row["forward_ms"], ",.3f"), said(row["both_ms"], ",.3f"), said(row["over_first"], ".3f")]
    found.append(said(row["peak_gib"], ".3f"))
    for rate, ceiling in shares.items():
        value = row[rate]
        share = None if value is None or pd.isna(value) else value / circumstances[ceiling]
        found += [said(value, ".4g"), said(share, ".0%")]
    return [*found, said(row["error"], ".1e")]
