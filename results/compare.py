"""Laying runs beside each other: rows of the same work are ranked, all others are shown with what makes them differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import ConfigError
from gptscale.launchers.options import parse
from gptscale.results.schema import SUMMARY_COLUMNS

# What makes two rows repeats of one configuration.
CONFIGURATION = (
    "recipe engine engine_version world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps "
    "activation_checkpointing compile offload device torch_version"
).split()
# Columns whose difference explains a different workload_hash when no run.json is at hand.
WORK = "model n_params seq_len vocab_size precision global_batch_size steps data seed".split()
TEXT = set(CONFIGURATION) - {"world_size", "dp_size", "tp_size", "pp_size", "micro_batch_size", "grad_accum_steps"}
TEXT |= {"run_id", "timestamp", "status", "error", "model", "precision", "data", "host", "git_commit", "workload_hash"}


def load(paths: Sequence[Path]) -> pd.DataFrame:
    """All rows of the given summary files (or the results folders that hold one), the column `folder` naming the runs' home."""
    frames = []
    for path in paths:
        file = path / "summary.csv" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{path} holds no summary.csv", "in compare", "give a results folder or a summary.csv")
        try:
            frame = pd.read_csv(
                file,
                dtype=dict.fromkeys(TEXT, str),
                keep_default_na=False,
                na_values=dict.fromkeys(set(SUMMARY_COLUMNS) - TEXT, [""]),
            )
        except (ValueError, pd.errors.ParserError) as error:
            raise ConfigError(
                f"{file} is no summary ({str(error).splitlines()[0][:100]})",
                "in compare",
                "give a file that gptscale wrote",
            ) from None
        if missing := [c for c in SUMMARY_COLUMNS if c not in frame]:
            raise ConfigError(
                f"{file} lacks the column {missing[0]!r}", "in compare", "give a file that gptscale wrote"
            )
        frames.append(frame.assign(folder=str(file.parent)))
    rows = pd.concat(frames, ignore_index=True)
    if rows.empty:
        raise ConfigError("there are no rows", "in compare", "run `gptscale sweep` first")
    return rows


LOG_COLUMNS = 110  # where there is no terminal whose width could be asked


@dataclass
class Group:
    """Runs of one configuration: repeats of each other."""

    name: str
    rows: pd.DataFrame
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> pd.DataFrame:
        return self.rows[self.rows.status == "ok"]

    def median(self, column: str) -> float | None:
        values = self.ok[column].dropna()
        return float(values.median()) if len(values) else None

    def spread(self) -> tuple[float, float] | None:
        """Lowest and highest tokens/s per device: over repeats, or for one run from its steps' p90 and p10."""
        ok = self.ok
        if len(ok) > 1:
            return float(ok.tokens_per_s_per_device.min()), float(ok.tokens_per_s_per_device.max())
        if len(ok) == 0 or pd.isna(ok.step_time_s_median.iloc[0]):
            return None
        run = ok.iloc[0]
        at_median = run.tokens_per_s_per_device * run.step_time_s_median
        return float(at_median / run.step_time_s_p90), float(at_median / run.step_time_s_p10)


@dataclass
class Comparison:
    """Groups of the same work, fastest first, and the groups that are not comparable with them."""

    ranked: list[Group]
    apart: list[Group]
    frame: pd.DataFrame


def compare(frame: pd.DataFrame) -> Comparison:
    """Group repeats, and rank those that did the work that most runs did; ties are decided for the newest."""
    counts = frame.groupby("workload_hash", sort=False).agg(n=("recipe", "nunique"), last=("timestamp", "max"))
    main = counts.sort_values(["n", "last"], ascending=False).index[0]
    ranked, apart = [], []
    reference = _work(frame[frame.workload_hash == main].iloc[-1])
    for (work, *_), rows in frame.groupby(["workload_hash", *CONFIGURATION], sort=False, dropna=False):
        group = Group(_name(rows.iloc[0]), rows)
        if work != main:
            group.notes.append("other work: " + (_differences(reference, _work(rows.iloc[0])) or "see run.json"))
            apart.append(group)
        else:
            ranked.append(group)
        group.notes += [f"{r.status}: {r.error}"[:160] for r in rows.itertuples() if r.status != "ok"]
    ranked.sort(key=lambda g: -(g.median("tokens_per_s") or 0.0))
    _note_ties(ranked)
    return Comparison(ranked, apart, frame)


def _name(row: Any) -> str:
    """Recipe and what splits it, with only the options that are not usual."""
    name = f"{row.recipe} x{row.world_size}"
    for axis in ("tp", "pp"):
        name += f" {axis}{getattr(row, axis + '_size')}" if getattr(row, axis + "_size") > 1 else ""
    name += f" ac={row.activation_checkpointing}" if row.activation_checkpointing != "none" else ""
    return name + (" compiled" if str(row["compile"]).lower() == "true" else "")


def _work(row: Any) -> dict[str, Any]:
    """What a run trained: run.json's workload if it is still there, else the columns that say so."""
    file = Path(row.folder) / "runs" / row.run_id / "run.json"
    if file.is_file():
        return dict(json.loads(file.read_bytes())["workload"])
    return {column: row[column] for column in WORK}


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return "; ".join(f"{k} {theirs[k]} (ranked: {ours[k]})" for k in ours if k in theirs and ours[k] != theirs[k])


def _note_ties(ranked: list[Group]) -> None:
    """Say so where a faster group's spread reaches into the next one's: then the order means nothing."""
    for faster, slower in pairwise(ranked):
        a, b = faster.spread(), slower.spread()
        per_rank = [g.median("world_size") or 1.0 for g in (faster, slower)]
        if a and b and a[0] * per_rank[0] <= b[1] * per_rank[1]:
            slower.notes.append(f"speed not distinguishable from {faster.name}")


def columns_of(group: Group, baseline: Group | None) -> dict[str, str]:
    """A group's cells for people."""
    tokens, step, loss = group.median("tokens_per_s"), group.median("step_time_s_median"), group.median("loss_last")
    base = baseline.median("tokens_per_s") if baseline else None
    p10, p90 = group.median("step_time_s_p10"), group.median("step_time_s_p90")
    mfu, allocated, rss = group.median("mfu"), group.median("peak_mem_allocated_gib"), group.median("peak_rss_gib")
    memory = f"{allocated:.2f}" if allocated is not None else f"{rss:.2f} (host)" if rss is not None else "-"
    statuses = sorted(set(group.rows.status))
    return {
        "recipe": group.name,
        "runs": str(len(group.rows)),
        "tokens/s": "-" if tokens is None else f"{tokens:,.0f}",
        "vs single": "-" if tokens is None or not base else f"{tokens / base:.2f}x",
        "step ms (p10-p90)": "-"
        if step is None or p10 is None or p90 is None
        else f"{step * 1e3:,.1f} ({p10 * 1e3:,.1f}-{p90 * 1e3:,.1f})",
        "MFU": "-" if mfu is None else f"{mfu:.1%}",
        "peak GiB": memory,
        "last loss": "-" if loss is None else f"{loss:.5f}",
        "status": " ".join(statuses),
    }


def cells(comparison: Comparison) -> list[dict[str, str]]:
    """All groups' cells, ranked ones first; speed is relative to `single`, else to the slowest."""
    ranked = [g for g in comparison.ranked if g.median("tokens_per_s") is not None]
    baseline = next((g for g in ranked if g.name == "single x1"), ranked[-1] if ranked else None)
    rows = [columns_of(group, baseline) for group in comparison.ranked]
    return rows + [columns_of(group, None) for group in comparison.apart]


def notes(comparison: Comparison) -> list[str]:
    """What must be said beside the table."""
    return [f"{group.name}: {note}" for group in comparison.ranked + comparison.apart for note in group.notes]


def show(comparison: Comparison, console: Console) -> None:
    """The table on a terminal."""
    rows = cells(comparison)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in rows[0]:
        table.add_column(title, justify="left" if title in ("recipe", "status") else "right", no_wrap=title != "status")
    for i, row in enumerate(rows):
        table.add_row(*row.values(), style="dim" if i >= len(comparison.ranked) else None)
    console.print(table)
    for note in notes(comparison):
        console.print(f"  note: {note}", style="yellow", markup=False, highlight=False)


def as_markdown(comparison: Comparison) -> str:
    """The table as Markdown."""
    rows = cells(comparison)
    lines = [
        "| " + " | ".join(rows[0]) + " |",
        "|" + "|".join(" --- " if t in ("recipe", "status") else " ---: " for t in rows[0]) + "|",
    ]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in row.values()) + " |" for row in rows]
    if said := notes(comparison):
        lines += ["", *(f"* {note}" for note in said)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class CompareOptions:
    """Where else the table goes; with none of them it is only printed."""

    csv: Path | None = None
    """Aggregated rows as CSV."""
    md: Path | None = None
    """The table as Markdown."""
    png: Path | None = None
    """Loss curves, speed and memory as a picture."""
    html: Path | None = None
    """One self-contained page with all of it."""


def main(argv: Sequence[str]) -> int:
    """gptscale compare PATH... [--csv F] [--md F] [--png F] [--html F]"""
    argv = list(argv)
    n = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    options = parse(CompareOptions, argv[n:], prog="gptscale compare PATH...", about="Rank runs of the same work.")
    if n == 0:
        raise ConfigError("no PATH is given", "in compare", "give a results folder, such as `gptscale compare results`")
    write([Path(p) for p in argv[:n]], options)
    return 0


def write_comparison(paths: Sequence[Path], out: Path) -> None:
    """Compare, print, and leave comparison.{csv,md,png,html} in `out`."""
    write(paths, CompareOptions(*(out / f"comparison.{kind}" for kind in ("csv", "md", "png", "html"))))


def write(paths: Sequence[Path], options: CompareOptions) -> None:
    """Print the comparison and write the files that `options` names."""
    comparison = compare(load(paths))
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=LOG_COLUMNS)
    show(comparison, console)
    if options.csv:
        pd.DataFrame(cells(comparison)).to_csv(options.csv, index=False)
    if options.md:
        options.md.write_text(as_markdown(comparison))
    if options.png or options.html:
        from gptscale.results.plots import figure_png
        from gptscale.results.report import page

        png = figure_png(comparison)
        if options.png:
            options.png.write_bytes(png)
        if options.html:
            options.html.write_text(page(comparison, png))
    for path in (options.csv, options.md, options.png, options.html):
        if path:
            console.print(f"wrote {path}", highlight=False)
