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
    def with_files(self) -> list[tuple[str, str]]:
        """The results folder and the name of each run whose own folder is still there, in their order."""
        has_files = self.rows.has_files.to_numpy()
        return list(zip(self.rows.folder[has_files], self.rows.run_id[has_files], strict=True))

    @property
    def contended(self) -> bool:
        """Return whether others took so much of the machine that the speed says little."""
        return (self.median("taken_fraction") or 0.0) > TAKEN_MAX

    @cached_property
    def first(self) -> Any:
        """The first row, of which all have the configuration. Taking a row out of a table takes a millisecond."""
        return self.rows.iloc[0]

    @cached_property
    def statuses(self) -> dict[str, int]:
        """How many runs ended with each status, the most frequent first, and of equally frequent ones the earliest."""
        return dict(Counter(self.rows.status.tolist()).most_common())

    @property
    def recipe(self) -> str:
        return str(self.first.recipe)

    def median(self, column: str) -> float | None:
        """Return the median over the runs that succeeded, None if there is no figure."""
        return self.medians.get(column)

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """Return the lowest and highest tokens/s of the repeats, or of one run those at its p90 and p10 step times."""
        import numpy as np

        tokens_per_s = self.rows.tokens_per_s.to_numpy()
        (timed,) = np.nonzero((self.rows.status == "ok").to_numpy() & ~np.isnan(tokens_per_s))
        if len(timed) == 0:
            return None
        if len(timed) > 1:
            return float(tokens_per_s[timed].min()), float(tokens_per_s[timed].max())
        run = self.rows.iloc[timed[0]]
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
        """Return the group that speeds are relative to: `single`, or else the one whose row was written first."""
        with_speed = [g for g in self.ranked if g.median("tokens_per_s") is not None]
        first = min(with_speed, key=lambda g: g.rows.index[0], default=None)
        return next((g for g in with_speed if g.recipe == "single"), first)


def compare(frame: pd.DataFrame, work: str | None = None) -> Comparison:
    """Group repeats, and rank the groups whose workload_hash is `work`.

    work: by default that of the most recipes, and among equals the newest. A row that is damaged is a group of its own.
    """
    is_damaged = frame.status == DAMAGED
    rows_apart = [row for _, row in frame[is_damaged].groupby(level=0)]
    damaged = [Group(row.run_id.iloc[0], row, [row.error.iloc[0]]) for row in rows_apart]
    if damaged:
        frame = frame[~is_damaged]
    if frame.empty:
        return Comparison(damaged, [])
    if work is None:
        works = frame.groupby("workload_hash").agg(recipes=("recipe", "nunique"), newest=("timestamp", "max"))
        work = str(works.sort_values(["recipes", "newest"], ascending=False).index[0])
    comparison = Comparison([], [])
    reference = frame[frame.workload_hash == work].iloc[-1]
    # Of the caller's table no column is taken, and none is kept here.
    frame = frame.copy(deep=False)
    for rows in _equals(frame, ["workload_hash", *CONFIGURATION]):
        group = Group("", rows)
        group.name = _name(group.first)
        if group.first.workload_hash == work:
            comparison.ranked.append(group)
        else:
            comparison.apart.append(group)
            group.notes.append(f"other work: {_differences(reference, group.first)}")
        group.notes += [remark if n == 1 else f"{remark} ({n:,} runs)" for remark, n in _remarks(rows).items()]
    comparison.ranked.sort(key=lambda g: -(g.median("tokens_per_s") or 0.0))
    for groups in (comparison.ranked, comparison.apart):
        _make_names_differ(groups)
    _mark_ties(comparison.ranked)
    comparison.apart += damaged
    return comparison


def _equals(frame: pd.DataFrame, columns: list[str]) -> list[pd.DataFrame]:
    """Move the rows that are equal in `columns` out of `frame`, as tables that share the memory of one in a new order.

    The columns are moved one by one, so that a million rows are not in memory twice.
    """
    import numpy as np
    import pandas as pd

    number = frame.groupby(columns, sort=False, dropna=False).ngroup().to_numpy()
    order = np.argsort(number, kind="stable")
    index = frame.index.take(order)
    moved = {name: frame.pop(name).array.take(order) for name in list(frame.columns)}
    ordered = pd.DataFrame(moved, index=index, copy=False)
    ends = np.cumsum(np.bincount(number)).tolist()
    return [ordered.iloc[begin:end] for begin, end in pairwise([0, *ends])]


def _remarks(rows: pd.DataFrame) -> Counter[str]:
    """Return what is wrong with runs of a group, and with how many of them."""
    remarks: Counter[str] = Counter()
    wrong = ((rows.status != "ok") | (rows.damage != "")).to_numpy()
    for row in rows[wrong].itertuples() if wrong.any() else ():
        if row.status != "ok":
            remarks[f"{row.status}: {row.error!s}"[:160]] += 1
        if row.damage:
            remarks[f"{row.run_id}: {row.damage!s}"] += 1
    return remarks


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
        firsts = pd.DataFrame([group.first for group in twins])
        differing = [column for column in CONFIGURATION if firsts[column].nunique() > 1]
        common = set.intersection(*(set(options.split("\n")) for options in firsts.recipe_options))
        for group in twins:
            own = [o for o in group.first.recipe_options.split("\n") if o not in common]
            columns = [f"{column}={group.first[column]}" for column in differing if column != "recipe_options"]
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
