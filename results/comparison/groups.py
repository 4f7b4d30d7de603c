"""Rows of runs in groups: those of the same work are ranked, all others are shown with what makes their work different."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import visible
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.results.comparison.rows import DAMAGED, FIGURES
from gptscale.results.comparison.run_files import clip, read_run_json

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

# What makes two rows repeats of one configuration.
CONFIGURATION = (
    "recipe engine engine_version world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps "
    "attention activation_checkpointing compile optimizer_state offload device torch_version recipe_options"
).split()
# Columns whose difference explains a different workload_hash when no run.json is at hand.
WORK = "model n_params seq_len vocab_size precision optimizer_state global_batch_size steps data seed".split()
# The texts that may differ between the repeats of a configuration, and are shown or lead to their files.
TEXTS_OF_RUNS = "run_id status error folder damage bound_by".split()


@dataclass(frozen=True, eq=False)
class GroupRows:
    """The rows of one group, as a part of columns that all groups share.

    Taking a part out of a DataFrame costs milliseconds for its 70 columns, and out of an array nothing.
    first: all columns of the first row. position: where each row was in the table that was read. Figures that no row of any group
    has are not among the columns.
    """

    first: dict[str, Any]
    position: NDArray[Any]
    columns: Mapping[str, NDArray[Any]]
    part: slice

    def __len__(self) -> int:
        return len(self.position)

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column][self.part]


@dataclass(eq=False)
class Group:
    """Runs of one configuration, which are repeats of each other.

    tied_with_faster: its spread reaches into that of the next faster group, or one of the two was measured on a machine that
    others used, so that their order means nothing.
    """

    name: str
    rows: GroupRows
    notes: list[str] = field(default_factory=list)
    tied_with_faster: bool = False

    @cached_property
    def medians(self) -> dict[str, float]:
        """The medians over the runs that succeeded, of the columns that have figures."""
        import numpy as np

        ok = self.rows["status"] == "ok"
        figures = {column: self.rows[column][ok] for column in FIGURES if column in self.rows.columns}
        present = {column: values[~np.isnan(values)] for column, values in figures.items()}
        return {column: float(np.median(values)) for column, values in present.items() if len(values)}

    @property
    def with_files(self) -> list[tuple[str, str]]:
        """The results folder and the name of each run whose own folder is still there, in their order."""
        has_files = self.rows["has_files"]
        return list(zip(self.rows["folder"][has_files], self.rows["run_id"][has_files], strict=True))

    @property
    def contended(self) -> bool:
        """Return whether others took so much of the machine that the speed says little."""
        return (self.median("taken_fraction") or 0.0) > TAKEN_MAX

    @property
    def first(self) -> dict[str, Any]:
        """The first row, of which all have the configuration."""
        return self.rows.first

    @cached_property
    def statuses(self) -> dict[str, int]:
        """How many runs ended with each status, the most frequent first, and of equally frequent ones the earliest."""
        return dict(Counter(self.rows["status"].tolist()).most_common())

    @property
    def recipe(self) -> str:
        return str(self.first["recipe"])

    def median(self, column: str) -> float | None:
        """Return the median over the runs that succeeded, None if there is no figure."""
        return self.medians.get(column)

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """Return the lowest and highest tokens/s of the repeats, or of one run those at its p90 and p10 step times."""
        import numpy as np

        columns = [f"step_time_s_{name}" for name in ("median", "p10", "p90")]
        if "tokens_per_s" not in self.medians:
            return None
        tokens_per_s = self.rows["tokens_per_s"]
        (timed,) = np.nonzero((self.rows["status"] == "ok") & ~np.isnan(tokens_per_s))
        if len(timed) > 1:
            return float(tokens_per_s[timed].min()), float(tokens_per_s[timed].max())
        if any(column not in self.rows.columns for column in columns):
            return None
        median, p10, p90 = (float(self.rows[column][timed[0]]) for column in columns)
        tokens = float(tokens_per_s[timed[0]]) * median
        if not (p10 > 0 and p90 > 0 and math.isfinite(tokens / p10)):
            return None
        return tokens / p90, tokens / p10


@dataclass(eq=False)
class Comparison:
    """Groups of the same work, fastest first, and the groups that are not comparable with them."""

    ranked: list[Group]
    apart: list[Group]

    @property
    def baseline(self) -> Group | None:
        """Return the group that speeds are relative to: `single`, or else the one whose row was written first."""
        with_speed = [g for g in self.ranked if g.median("tokens_per_s") is not None]
        first = min(with_speed, key=lambda g: g.rows.position[0], default=None)
        return next((g for g in with_speed if g.recipe == "single"), first)


def compare(frame: pd.DataFrame, work: str | None = None) -> Comparison:
    """Group repeats, and rank the groups whose workload_hash is `work`.

    work: by default that of the most recipes, and among equals the newest. A row that is damaged is a group of its own.
    """
    import numpy as np

    is_damaged = (frame.status == DAMAGED).to_numpy()
    good, rows_damaged = np.flatnonzero(~is_damaged), np.flatnonzero(is_damaged)
    reference: dict[str, Any] = {}
    if len(good):
        if work is None:
            work = _work_of_most_recipes(frame[["workload_hash", "recipe", "timestamp"]].iloc[good])
        (reference,) = _records(frame, good[(frame.workload_hash == work).to_numpy()[good]][-1:])
    comparison = Comparison([], [])
    damaged: list[Group] = []
    # Of the caller's table no column is taken, and none is kept here.
    frame = frame.copy(deep=False)
    for rows in _grouped(frame, good, rows_damaged):
        first = rows.first
        if first["status"] == DAMAGED:
            damaged.append(Group(first["run_id"], rows, [first["error"]]))
            continue
        group = Group(_name(first), rows)
        if first["workload_hash"] == work:
            comparison.ranked.append(group)
        else:
            comparison.apart.append(group)
            group.notes.append(f"other work: {_differences(reference, first)}")
        group.notes += [remark if n == 1 else f"{remark} ({n:,} runs)" for remark, n in _remarks(rows).items()]
    comparison.ranked.sort(key=lambda g: -(g.median("tokens_per_s") or 0.0))
    for groups in (comparison.ranked, comparison.apart):
        _make_names_differ(groups)
    _mark_ties(comparison.ranked)
    (comparison.apart if len(good) else comparison.ranked).extend(damaged)
    return comparison


def _work_of_most_recipes(frame: pd.DataFrame) -> str:
    """Return the workload_hash that most recipes have, and among equals the newest."""
    works = list(frame.workload_hash.unique())
    if len(works) > 1:
        of_work = frame.groupby("workload_hash", observed=True).agg(
            recipes=("recipe", "nunique"), newest=("timestamp", "max")
        )
        works = of_work.sort_values(["recipes", "newest"], ascending=False).index.tolist()
    return str(works[0])


def _records(frame: pd.DataFrame, positions: NDArray[Any]) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in frame.iloc[positions].to_dict("records")]


def _grouped(frame: pd.DataFrame, good: NDArray[Any], alone: NDArray[Any]) -> list[GroupRows]:
    """Take the columns out of `frame` and cut them into groups: rows of equal configuration and work, then those `alone`.

    The columns are moved one by one, so that a million rows are not in memory twice.
    """
    import numpy as np

    columns = ["workload_hash", *CONFIGURATION]
    number = good
    if len(good):
        keys = frame[columns].iloc[good]
        number = keys.groupby(columns, sort=False, dropna=False, observed=True).ngroup().to_numpy()
    order = np.concatenate([good[np.argsort(number, kind="stable")], alone])
    ends = np.concatenate([np.cumsum(np.bincount(number)), np.arange(len(good), len(order)) + 1]).tolist()
    parts = [slice(begin, end) for begin, end in pairwise([0, *ends])]
    firsts = _records(frame, order[[part.start for part in parts]])
    moved = {name: np.asarray(frame.pop(name), dtype=object)[order] for name in TEXTS_OF_RUNS}
    moved["has_files"] = frame.pop("has_files").to_numpy()[order]
    for name in FIGURES:
        values = frame.pop(name).to_numpy()
        if not np.isnan(values).all():
            moved[name] = values[order]
    return [GroupRows(first, order[part], moved, part) for first, part in zip(firsts, parts, strict=True)]


def _remarks(rows: GroupRows) -> Counter[str]:
    """Return what is wrong with runs of a group, and with how many of them."""
    remarks: Counter[str] = Counter()
    wrong = (rows["status"] != "ok") | (rows["damage"] != "")
    for run_id, status, error, damage in zip(
        *(rows[name][wrong] for name in ("run_id", "status", "error", "damage")), strict=True
    ):
        if status != "ok":
            remarks[f"{status}: {error}"[:160]] += 1
        if damage:
            remarks[f"{run_id}: {damage}"] += 1
    return remarks


def _name(row: Mapping[str, Any]) -> str:
    """Return the recipe and what splits it, with only those options that are not the usual ones."""
    name = f"{row['recipe']} x{row['world_size']}"
    for axis in ("tp", "pp"):
        name += f" {axis}{row[f'{axis}_size']}" if row[f"{axis}_size"] > 1 else ""
    name += f" ac={row['activation_checkpointing']}" if row["activation_checkpointing"] != "none" else ""
    name += f" state={row['optimizer_state']}" if row["optimizer_state"] != "fp32" else ""
    return name + (" compiled" if row["compile"] == "true" else "")


def _make_names_differ(groups: list[Group]) -> None:
    """Add to equal names the options in which their groups differ."""
    named: dict[str, list[Group]] = {}
    for group in groups:
        named.setdefault(group.name, []).append(group)
    for twins in named.values():
        differing = [column for column in CONFIGURATION if len({group.first[column] for group in twins}) > 1]
        common = set.intersection(*(set(group.first["recipe_options"].split("\n")) for group in twins))
        for group in twins:
            own = [o for o in group.first["recipe_options"].split("\n") if o not in common]
            columns = [f"{column}={group.first[column]}" for column in differing if column != "recipe_options"]
            group.name += "".join(f" {option}" for option in columns + own)


def _differences(reference: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Name the parts of the work that differ, by run.json if both runs have it, or else by their columns."""
    a, b = (read_run_json(each["folder"], each["run_id"]).workload for each in (reference, row))
    if a is None or b is None:
        a, b = ({column: each[column] for column in WORK} for each in (reference, row))
    parts = [visible(f"{k} {b.get(k)} (ranked: {a.get(k)})") for k in {**a, **b} if a.get(k) != b.get(k)]
    return clip("; ".join(clip(part) for part in parts), 1000) or "in something that only run.json tells, which is gone"


def _mark_ties(ranked: list[Group]) -> None:
    for faster, slower in pairwise(ranked):
        slow, fast = slower.spread, faster.spread
        contended = slower.contended or faster.contended
        slower.tied_with_faster = slow is not None and fast is not None and (contended or slow[1] >= fast[0])
