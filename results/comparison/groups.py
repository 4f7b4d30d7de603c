"""Rows of runs in groups: those of the same work are ranked, all others are shown with what makes their work different."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import visible
from gptscale.common.measure.contention import TAKEN_MAX
from gptscale.results.comparison.rows import DAMAGED, FIGURES
from gptscale.results.comparison.run_files import clip, read_run_json

if TYPE_CHECKING:
    import pandas as pd

# What makes two rows repeats of one configuration.
CONFIGURATION = (
    "recipe engine engine_version world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps "
    "activation_checkpointing compile optimizer_state offload device torch_version recipe_options"
).split()
# Columns whose difference explains a different workload_hash when no run.json is at hand.
WORK = "model n_params seq_len vocab_size precision optimizer_state global_batch_size steps data seed".split()


@dataclass(eq=False)
class Group:
    """Runs of one configuration, which are repeats of each other.

    tied_with_faster: its spread reaches into that of the next faster group, or one of the two was measured on a machine that
    others used, so that their order means nothing.
    """

    name: str
    rows: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    tied_with_faster: bool = False

    @cached_property
    def medians(self) -> dict[str, float]:
        """The medians over the runs that succeeded, of the columns that have figures."""
        import numpy as np

        ok = (self.rows.status == "ok").to_numpy()
        # Column by column: all at once they would be copied as often as there are groups.
        figures = {column: self.rows[column].to_numpy()[ok] for column in FIGURES}
        present = {column: values[~np.isnan(values)] for column, values in figures.items()}
        return {column: float(np.median(values)) for column, values in present.items() if len(values)}

    @property
    def contended(self) -> bool:
        """Return whether others took so much of the machine that the speed says little."""
        return (self.median("taken_fraction") or 0.0) > TAKEN_MAX

    @property
    def recipe(self) -> str:
        return str(self.rows.recipe.iloc[0])

    def median(self, column: str) -> float | None:
        """Return the median over the runs that succeeded, None if there is no figure."""
        return self.medians.get(column)

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """Return the lowest and highest tokens/s of the repeats, or of one run those at its p90 and p10 step times."""
        ok = (self.rows.status == "ok") & self.rows.tokens_per_s.notna()
        tokens_per_s = self.rows.tokens_per_s[ok]
        if len(tokens_per_s) == 0:
            return None
        if len(tokens_per_s) > 1:
            return float(tokens_per_s.min()), float(tokens_per_s.max())
        run = self.rows[ok].iloc[0]
        tokens = float(run.tokens_per_s * run.step_time_s_median)
        if not (run.step_time_s_p10 > 0 and run.step_time_s_p90 > 0 and math.isfinite(tokens / run.step_time_s_p10)):
            return None
        return tokens / float(run.step_time_s_p90), tokens / float(run.step_time_s_p10)


@dataclass(eq=False)
class Comparison:
    """Groups of the same work, fastest first, and the groups that are not comparable with them."""

    ranked: list[Group]
    apart: list[Group]

    @property
    def baseline(self) -> Group | None:
        """Return the group that speeds are relative to: `single`, or else the slowest that ran."""
        with_speed = [g for g in self.ranked if g.median("tokens_per_s") is not None]
        slowest = with_speed[-1] if with_speed else None
        return next((g for g in with_speed if g.recipe == "single"), slowest)


def compare(frame: pd.DataFrame, work: str | None = None) -> Comparison:
    """Group repeats, and rank the groups whose workload_hash is `work`.

    work: by default that of the most recipes, and among equals the newest. A row that is damaged is a group of its own.
    """
    is_damaged = frame.status == DAMAGED
    rows_apart = [row for _, row in frame[is_damaged].groupby(level=0)]
    damaged = [Group(row.run_id.iloc[0], row, [row.error.iloc[0]]) for row in rows_apart]
    frame = frame[~is_damaged]
    if frame.empty:
        return Comparison(damaged, [])
    if work is None:
        works = frame.groupby("workload_hash").agg(recipes=("recipe", "nunique"), newest=("timestamp", "max"))
        work = str(works.sort_values(["recipes", "newest"], ascending=False).index[0])
    comparison = Comparison([], [])
    remarks: dict[Any, list[str]] = {}
    for row in frame[(frame.status != "ok") | (frame.damage != "")].itertuples():
        status = [] if row.status == "ok" else [f"{row.status}: {row.error!s}"[:160]]
        remarks[row.Index] = [*status, f"{row.run_id}: {row.damage!s}"] if row.damage else status
    reference = frame[frame.workload_hash == work].iloc[-1]
    for (group_work, *_), rows in frame.groupby(["workload_hash", *CONFIGURATION], sort=False, dropna=False):
        group = Group(_name(rows.iloc[0]), rows)
        if group_work == work:
            comparison.ranked.append(group)
        else:
            comparison.apart.append(group)
            group.notes.append(f"other work: {_differences(reference, rows.iloc[0])}")
        counts = Counter(remark for row in rows.index.intersection(list(remarks)) for remark in remarks[row])
        group.notes += [remark if n == 1 else f"{remark} ({n:,} runs)" for remark, n in counts.items()]
    comparison.ranked.sort(key=lambda g: -(g.median("tokens_per_s") or 0.0))
    for groups in (comparison.ranked, comparison.apart):
        _make_names_differ(groups)
    _mark_ties(comparison.ranked)
    comparison.apart += damaged
    return comparison


def _name(row: Any) -> str:
    """Return the recipe and what splits it, with only those options that are not the usual ones."""
    name = f"{row.recipe} x{row.world_size}"
    for axis in ("tp", "pp"):
        name += f" {axis}{row[f'{axis}_size']}" if row[f"{axis}_size"] > 1 else ""
    name += f" ac={row.activation_checkpointing}" if row.activation_checkpointing != "none" else ""
    name += f" state={row.optimizer_state}" if row.optimizer_state != "fp32" else ""
    return name + (" compiled" if row["compile"] == "true" else "")


def _make_names_differ(groups: list[Group]) -> None:
    """Add to equal names the options in which their groups differ."""
    import pandas as pd

    named: dict[str, list[Group]] = {}
    for group in groups:
        named.setdefault(group.name, []).append(group)
    for twins in named.values():
        firsts = pd.DataFrame([group.rows.iloc[0] for group in twins])
        differing = [column for column in CONFIGURATION if firsts[column].nunique() > 1]
        common = set.intersection(*(set(options.split("\n")) for options in firsts.recipe_options))
        for group in twins:
            own = [o for o in group.rows.recipe_options.iloc[0].split("\n") if o not in common]
            columns = [f"{column}={group.rows[column].iloc[0]}" for column in differing if column != "recipe_options"]
            group.name += "".join(f" {option}" for option in columns + own)


def _differences(reference: Any, row: Any) -> str:
    """Name the parts of the work that differ, by run.json if both runs have it, or else by their columns."""
    a, b = (read_run_json(each.folder, each.run_id).workload for each in (reference, row))
    if a is None or b is None:
        a, b = ({column: each[column] for column in WORK} for each in (reference, row))
    parts = [visible(f"{k} {b.get(k)} (ranked: {a.get(k)})") for k in {**a, **b} if a.get(k) != b.get(k)]
    return clip("; ".join(clip(part) for part in parts), 1000) or "in something that only run.json tells, which is gone"


def _mark_ties(ranked: list[Group]) -> None:
    for faster, slower in pairwise(ranked):
        slow, fast = slower.spread, faster.spread
        contended = slower.contended or faster.contended
        slower.tied_with_faster = slow is not None and fast is not None and (contended or slow[1] >= fast[0])
