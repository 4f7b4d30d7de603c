"""The figures of the memory ladder: a line for each job, the largest model of each way, and all tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks.measurement import or_dash
from benchmarks.memory.search import GIB, Limits, measured_gib, predicted_gib
from benchmarks.memory.trial import COLUMNS, Job, JobSearch
from gptscale.common.errors import ConfigError
from gptscale.results import render

LEFT = ("model", "recipe", "checkpointing", "moments", "fits")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the tries in a CSV that an earlier call wrote, none if it does not exist.

    Raise ConfigError for another file.
    """
    if not path.exists():
        return []
    frame = pd.read_csv(
        path, keep_default_na=False, na_values=[""], dtype={"torch_version": str, "engine_version": str}
    )
    if list(frame.columns) != COLUMNS:
        raise ConfigError(f"{path} has other columns", "in --csv", "name another file")
    rows = frame.fillna({"why": "", "engine_version": ""}).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def rows_of_other_jobs(rows: Sequence[Mapping[str, Any]], jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the rows of another model, way, device or version than the jobs', which stay in the file."""
    return [dict(row) for row in rows if not any(job.owns(row) for job in jobs)]


@dataclass
class Ladder:
    """All searches within `limit`.

    others: rows of the same file that belong to none of them.
    """

    searches: Sequence[JobSearch]
    limit: Limits
    others: list[dict[str, Any]] = field(default_factory=list)

    def cells(self, search: JobSearch) -> dict[str, str]:
        """Return a job's line by title: its largest batch and the figures there, or why there is none."""
        job, best = search.job, search.best(self.limit)
        batch = int(best["micro_batch_size"]) if best else search.predicted
        too_large = [b for b, fits in search.fitted(self.limit).items() if not fits and b > batch]
        predicted_peak = predicted_gib(job.need(batch), job.way.recipe, self.limit.device_type)
        return {
            "model": job.model,
            "recipe": job.way.recipe,
            "checkpointing": job.way.activation_checkpointing,
            "moments": job.way.optimizer_state,
            "fits": self.verdict(search),
            "batch": str(batch) if best else "-",
            "not": str(min(too_large)) if best and too_large else "-",
            "predicted": str(search.predicted),
            "tokens/s": or_dash(best["tokens_per_s"] if best else None, ",.0f"),
            "peak GiB": or_dash(measured_gib(best, self.limit.device_type) if best else None, ".2f"),
            "predicted GiB": f"{predicted_peak:.2f}",
            "tries": str(len(search.tries)),
        }

    def verdict(self, search: JobSearch) -> str:
        """Return yes, no, failed, or a question mark where nothing was tried that could tell."""
        if search.best(self.limit) is not None:
            return "yes"
        if search.failure:
            return "failed"
        return "no" if search.fitted(self.limit).get(1) is False or "lacks" in search.why else "?"

    def notes(self) -> list[str]:
        """Return what the table does not say: why there is no batch, or no end to the search."""
        reasons = ((search, search.failure or search.why) for search in self.searches)
        return [f"{search.job}: {why}" for search, why in reasons if why]

    def has_tries(self) -> bool:
        """Return whether anything was tried, now or in an earlier call."""
        return any(search.tries for search in self.searches)

    def largest(self) -> list[str]:
        """Return a line for each way: the largest model that fitted, and its batch."""
        lines = []
        for way in dict.fromkeys(search.job.way for search in self.searches):
            line = f"{way}: none that was tried"
            most_params = 0
            for search in (s for s in self.searches if s.job.way == way):
                row = search.best(self.limit)
                if row and search.job.gpt.n_params > most_params:
                    most_params = search.job.gpt.n_params
                    line = f"{way}: {search.job.model}, batch {row['micro_batch_size']:.0f}"
            lines.append(line)
        return lines

    def heading(self) -> str:
        """Return device, versions and limits."""
        job, limit = self.searches[0].job, self.limit
        unit = "reserved on the device" if limit.device_type == "cuda" else "resident"
        compiled = ", compiled" if job.compile else ""
        return (
            f"{job.device}, torch {torch.__version__}, {job.precision}{compiled}, sequence {job.seq_len}; "
            f"budget {limit.budget / GIB:.2f} GiB {unit}, host {limit.host / GIB:.1f} GiB"
        )

    def markdown(self) -> str:
        """Return heading, table, notes and the largest model of each way in Markdown."""
        rows = [self.cells(search) for search in self.searches]
        text = f"{self.heading()}\n\n{render.markdown(rows, left=LEFT, notes=self.notes())}"
        if self.has_tries():
            text += "\nLargest model, by way:\n\n" + "".join(f"* {line}\n" for line in self.largest())
        return text

    def frame(self) -> pd.DataFrame:
        """Return all tries, where the column `largest` marks each job's largest batch that fitted."""
        rows = list(self.others)
        for search in self.searches:
            best = search.best(self.limit)
            rows += [row | {"largest": row is best} for row in search.tries]
        return pd.DataFrame(rows, columns=COLUMNS)
