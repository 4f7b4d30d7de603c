"""Rows of runs in groups: those of the same work are ranked, all others are shown with what makes their work different."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gptscale.common.errors import visible
from gptscale.common.measure.limits import TAKEN_MAX
from gptscale.common.settings.run_config import AXIS_SIZES, MODEL_AXES
from gptscale.results.columns import SUMMARY
from gptscale.results.comparison.read import DAMAGED, Row
from gptscale.results.comparison.run_files import clip, read_run_json

# Two rows that agree in these columns are repeats of one configuration.
CONFIGURATION = (
    "recipe engine engine_version world_size dp_size micro_batch_size grad_accum_steps attention activation_checkpointing "
    "compile optimizer_state offload device torch_version recipe_options imported_from"
).split()
CONFIGURATION += AXIS_SIZES
# Columns whose difference explains a different workload_hash when no run.json is at hand.
WORK = (
    "model n_params seq_len vocab_size precision optimizer lr optimizer_state global_batch_size steps data seed".split()
)
FIGURES = SUMMARY.of_type(float)
# Work that differs in these alone is the same steps on the same data, computed in another way or in other portions.
TECHNIQUE, PORTIONS = {"precision", "optimizer_state"}, {"global_batch_size", "steps"}


@dataclass(eq=False)
class Group:
    """Runs of one configuration, which are repeats of each other.

    position: where the first row was among all rows. tier: number of the tier of speed, None for a group that is in none.
    is_technique: whether its work differs in a technique alone, so that its speed has a ratio.
    """

    name: str
    rows: list[Row]
    position: int = 0
    notes: list[str] = field(default_factory=list)
    tier: int | None = None
    is_technique: bool = False

    @cached_property
    def medians(self) -> dict[str, float]:
        """The medians over the runs that succeeded, of the columns that have figures."""
        ok = [row for row in self.rows if row["status"] == "ok"]
        present = {name: [row[name] for row in ok if not math.isnan(row[name])] for name in FIGURES}
        return {name: statistics.median(values) for name, values in present.items() if values}

    @property
    def with_files(self) -> list[tuple[str, str]]:
        """The results folder and the name of each run whose own folder is still there, in their order."""
        return [(row["folder"], row["run_id"]) for row in self.rows if row["has_files"]]

    @property
    def contended(self) -> bool:
        """Return whether others took so much of the machine that the speed says little."""
        return (self.median("taken_fraction") or 0.0) > TAKEN_MAX

    @property
    def first(self) -> Row:
        """The first row, whose configuration all have."""
        return self.rows[0]

    @cached_property
    def statuses(self) -> dict[str, int]:
        """How many runs ended with each status, the most frequent first, and of equally frequent ones the earliest."""
        return dict(Counter(row["status"] for row in self.rows).most_common())

    @property
    def recipe(self) -> str:
        return str(self.first["recipe"])

    def median(self, column: str) -> float | None:
        """Return the median over the runs that succeeded, None if there is no figure."""
        return self.medians.get(column)

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """Return the lowest and highest tokens/s of the repeats, or of one run those at its p90 and p10 step times."""
        timed = [row for row in self.rows if row["status"] == "ok" and not math.isnan(row["tokens_per_s"])]
        if len(timed) != 1:
            speeds = [row["tokens_per_s"] for row in timed]
            return (min(speeds), max(speeds)) if speeds else None
        (row,) = timed
        p10, p90 = row["step_time_s_p10"], row["step_time_s_p90"]
        tokens = row["tokens_per_s"] * row["step_time_s_median"]
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
        """Return the group that speeds are relative to: of `single`, or else of all, the one whose row was written first."""
        with_speed = [g for g in self.ranked if g.median("tokens_per_s") is not None]
        return min(with_speed, key=lambda g: (g.recipe != "single", g.position), default=None)


def compare(rows: Sequence[Row], work: str | None = None) -> Comparison:
    """Group repeats, and rank the groups whose workload_hash is `work`.

    work: by default that of the most recipes, and among equals the newest. A row that is damaged is a group of its own.
    """
    good = [row for row in rows if row["status"] != DAMAGED]
    ours = [row for row in good if not row["imported_from"]] or good
    if good and work is None:
        work = _work_of_most_recipes(ours)
    reference = next((row for row in reversed(ours) if row["workload_hash"] == work), None)
    groups: dict[tuple[object, ...], Group] = {}
    for position, row in enumerate(good):
        key = tuple(row[column] for column in ("workload_hash", *CONFIGURATION))
        groups.setdefault(key, Group(_name(row), [], position)).rows.append(row)
    comparison = Comparison([], [])
    for group in groups.values():
        if reference and group.first["workload_hash"] != work:
            comparison.apart.append(group)
            different, told = _differences(reference, group.first)
            group.is_technique = bool(different) and different <= TECHNIQUE
            kind = "other work"
            if group.is_technique:
                kind = "same data by another technique"
                group.name += f" {group.first['precision']}" * ("precision" in different)
            elif different and different <= PORTIONS and _tokens(group.first) == _tokens(reference):
                kind = "as many tokens in other batches"
            group.notes.append(f"{kind}: {told}")
        else:
            comparison.ranked.append(group)
        group.notes += [remark if n == 1 else f"{remark} ({n:,} runs)" for remark, n in _remarks(group.rows).items()]
    comparison.ranked.sort(key=lambda g: -(g.median("tokens_per_s") or 0.0))
    for alike in (comparison.ranked, comparison.apart):
        _make_names_differ(alike)
    _mark_tiers(comparison.ranked)
    damaged = [Group(row["run_id"], [row], notes=[row["error"]]) for row in rows if row["status"] == DAMAGED]
    (comparison.apart if good else comparison.ranked).extend(damaged)
    return comparison


def _work_of_most_recipes(rows: Sequence[Row]) -> str:
    """Return the workload_hash that most recipes have, and among equals the newest."""
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["workload_hash"]].append(row)
    return max(runs, key=lambda work: (len({r["recipe"] for r in runs[work]}), max(r["timestamp"] for r in runs[work])))


def _remarks(rows: Sequence[Row]) -> Counter[str]:
    """Return what is wrong with runs of a group, and with how many of them."""
    remarks: Counter[str] = Counter()
    for row in rows:
        if row["status"] != "ok":
            remarks[f"{row['status']}: {row['error']}"[:160]] += 1
        if row["imported_from"]:
            remarks[f"imported from {row['imported_from']}, its figures are as that program defines them"] += 1
        if row["damage"]:
            remarks[f"{row['run_id']}: {row['damage']}"] += 1
    return remarks


def _name(row: Row) -> str:
    """Return the recipe and what splits it, with only those options that are not the usual ones."""
    name = f"{row['recipe']} x{row['world_size']}"
    for axis in MODEL_AXES:
        name += f" {axis}{row[f'{axis}_size']}" if row[f"{axis}_size"] > 1 else ""
    name += f" ac={row['activation_checkpointing']}" if row["activation_checkpointing"] not in ("", "none") else ""
    name += f" state={row['optimizer_state']}" if row["optimizer_state"] != "fp32" else ""
    return name + (" compiled" if row["compile"] == "true" else "")


def _make_names_differ(groups: list[Group]) -> None:
    """Add to equal names the options in which their groups differ."""
    named: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        named[group.name].append(group)
    for twins in named.values():
        differing = [column for column in CONFIGURATION if len({group.first[column] for group in twins}) > 1]
        common = set.intersection(*(set(group.first["recipe_options"].split("\n")) for group in twins))
        for group in twins:
            own = [o for o in group.first["recipe_options"].split("\n") if o not in common]
            columns = [f"{column}={group.first[column]}" for column in differing if column != "recipe_options"]
            group.name += "".join(f" {option}" for option in columns + own)


def _tokens(row: Row) -> float:
    """Return the sequences of a whole run."""
    return float(row["global_batch_size"] * row["steps"])


def _differences(reference: Row, row: Row) -> tuple[set[str], str]:
    """Return the parts of the work that differ and a text of them, by run.json if both runs have it, or else by columns."""
    a, b = (read_run_json(each["folder"], each["run_id"]).workload for each in (reference, row))
    if a is None or b is None:
        # A row of an earlier version, or of another program, knows nothing of a column whose cell is empty.
        known = [name for name in WORK if all(each[name] not in ("", 0, math.nan) for each in (reference, row))]
        a, b = ({column: each[column] for column in known} for each in (reference, row))
    different = [k for k in {**a, **b} if a.get(k) != b.get(k)]
    parts = [visible(f"{k} {b.get(k)} (ranked: {a.get(k)})") for k in different]
    unknown = (
        "nobody says it is the same (import --same-work)" if row["imported_from"] else "only its run.json could tell"
    )
    return {*different}, clip("; ".join(clip(part) for part in parts), 1000) or unknown


def _mark_tiers(ranked: Sequence[Group]) -> None:
    """Number the tiers of speed: the spread of each group of a tier reaches into that of its first, which is the fastest.

    The speed of a contended group says little, so that it is in no tier.
    """
    tier, best = 0, None
    for group in ranked:
        if group.contended or group.median("tokens_per_s") is None:
            continue
        if not (best and group.spread and group.spread[1] >= best[0]):
            tier, best = tier + 1, group.spread
        group.tier = tier
