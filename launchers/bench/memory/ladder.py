"""The memory ladder as a table: for the terminal, for Markdown, as CSV of all tries, and the largest model of each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from gptscale.common.errors import ConfigError
from gptscale.launchers.bench.memory.command import Found
from gptscale.launchers.bench.memory.formula import Way
from gptscale.launchers.bench.memory.search import GIB, Limits, measured_gib, predicted_gib
from gptscale.launchers.bench.memory.trial import COLUMNS
from gptscale.results.record.files import replace_file

LEFT = ("model", "recipe", "checkpointing", "moments", "fits")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The tries in a CSV that an earlier call wrote, none if it does not exist; ConfigError if it is another file."""
    if not path.exists():
        return []
    frame = pd.read_csv(
        path, keep_default_na=False, na_values=[""], dtype={"torch_version": str, "engine_version": str}
    )
    if list(frame.columns) != COLUMNS:
        raise ConfigError(f"{path} has other columns", "in --csv", "name another file")
    rows = frame.fillna({"why": "", "engine_version": ""}).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


@dataclass
class Ladder:
    """All that was found under `limit`. others: rows of the same file that are of something else."""

    found: Sequence[Found]
    limit: Limits
    others: list[dict[str, Any]] = field(default_factory=list)

    def cells(self, found: Found) -> dict[str, str]:
        """A job's line: its largest batch and the figures there, or why there is none."""
        job, best = found.job, found.best(self.limit)
        batch = int(best["micro_batch_size"]) if best else found.predicted
        above = [b for b, fitted in found.known(self.limit).items() if not fitted and b > batch]
        peak = measured_gib(best, self.limit.device_type) if best else None
        predicted = predicted_gib(job.need(batch), job.way.recipe, self.limit.device_type)
        cells = dict(zip(("model", "recipe", "checkpointing", "moments"), (job.model, *job.way), strict=True))
        tokens = best["tokens_per_s"] if best else None
        return cells | {
            "fits": self.verdict(found),
            "batch": str(batch) if best else "-",
            "not": str(min(above)) if best and above else "-",
            "predicted": str(found.predicted),
            "tokens/s": "-" if tokens is None or pd.isna(tokens) else f"{tokens:,.0f}",
            "peak GiB": "-" if peak is None else f"{peak:.2f}",
            "predicted GiB": f"{predicted:.2f}",
            "tries": str(len(found.tries)),
        }

    def verdict(self, found: Found) -> str:
        """yes, no, failed, or a question mark where nothing was tried that could tell."""
        if found.best(self.limit) is not None:
            return "yes"
        if found.failure:
            return "failed"
        return "no" if found.known(self.limit).get(1) is False or "lacks" in found.why else "?"

    def notes(self) -> list[str]:
        """What the table does not say: why there is no batch, or no end to the search."""
        said = ((found, found.failure or found.why) for found in self.found)
        return [f"{found.job}: {why}" for found, why in said if why]

    def largest(self) -> list[str]:
        """For each way the largest model that fitted, and its batch."""
        lines = []
        for way in dict.fromkeys(found.job.way for found in self.found):
            fitting = [f for f in self.found if f.job.way == way and f.best(self.limit)]
            best = max(fitting, key=lambda f: f.job.gpt.n_params, default=None)
            row = best.best(self.limit) if best else None
            said = f"{best.job.model}, batch {row['micro_batch_size']:.0f}" if best and row else "none that was tried"
            lines.append(f"{way}: {said}")
        return lines

    def heading(self) -> str:
        """Device, versions, limits."""
        job, limit = self.found[0].job, self.limit
        unit = "reserved on the device" if limit.device_type == "cuda" else "resident"
        compiled = ", compiled" if job.compile else ""
        return (
            f"{job.device}, torch {torch.__version__}, {job.precision}{compiled}, sequence {job.seq_len}; "
            f"budget {limit.budget / GIB:.2f} GiB {unit}, host {limit.host / GIB:.1f} GiB"
        )

    def show(self) -> None:
        """The table, its notes, the largest model of each way."""
        console = Console(width=None if Console().is_terminal else 125, highlight=False)
        rows = [self.cells(found) for found in self.found]
        table = Table(box=None, pad_edge=False)
        for title in rows[0]:
            table.add_column(title, justify="left" if title in LEFT else "right")
        for row in rows:
            table.add_row(*row.values())
        console.print(self.heading(), markup=False)
        console.print(table)
        for line in self.notes():
            console.print(f"note: {line}", markup=False)
        if any(found.tries for found in self.found):
            console.print("\nlargest model, by way")
            for line in self.largest():
                console.print(f"  {line}", markup=False)

    def markdown(self) -> str:
        """The same in Markdown."""
        rows = [self.cells(found) for found in self.found]

        def line(words: Sequence[str]) -> str:
            return "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"

        lines = [self.heading(), "", line(list(rows[0])), line(["---" if t in LEFT else "---:" for t in rows[0]])]
        lines += [line(list(row.values())) for row in rows]
        lines += ["", *(f"* {note}" for note in self.notes())] if self.notes() else []
        if any(found.tries for found in self.found):
            lines += ["", "Largest model, by way:", "", *(f"* {said}" for said in self.largest())]
        return "\n".join(lines) + "\n"

    def frame(self) -> pd.DataFrame:
        """All tries; `largest` marks each job's row."""
        rows = list(self.others)
        for found in self.found:
            best = found.best(self.limit)
            rows += [row | {"largest": row is best} for row in found.tries]
        return pd.DataFrame(rows, columns=COLUMNS)

    def write_csv(self, path: Path | None) -> None:
        """All tries, whole or not at all: a later call goes on from this file."""
        if path is not None:
            replace_file(path, self.frame().to_csv(index=False).encode())

    def write(self, table: Path | None, md: Path | None, png: Path | None) -> None:
        """CSV, Markdown and picture, where asked for."""
        self.write_csv(table)
        if md is not None:
            md.write_text(self.markdown())
        if png is not None:
            from gptscale.launchers.bench.memory.picture import draw

            draw(self, png)
        for path in (table, md, png):
            if path is not None:
                print(f"wrote {path}")


def ways_in(found: Sequence[Found]) -> list[Way]:
    """The ways of all jobs, in order, each once."""
    return list(dict.fromkeys(f.job.way for f in found))
