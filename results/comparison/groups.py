"""Rows of runs in groups: those of the same work are ranked, all others are shown with what makes their work different."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptscale.common.errors import ConfigError
from gptscale.results.record.columns import NEW_SINCE_1, SUMMARY_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

# What makes two rows repeats of one configuration.
CONFIGURATION = (
    "recipe engine engine_version world_size dp_size tp_size pp_size micro_batch_size grad_accum_steps "
    "activation_checkpointing compile optimizer_state offload device torch_version recipe_options"
).split()
# Columns whose difference explains a different workload_hash when no run.json is at hand.
WORK = "model n_params seq_len vocab_size precision optimizer_state global_batch_size steps data seed".split()
TEXT = (
    "run_id timestamp status error recipe engine engine_version model precision activation_checkpointing compile "
    "optimizer_state offload data device host torch_version git_commit workload_hash"
).split()
NUMBERS = [column for column in SUMMARY_COLUMNS if column not in TEXT]


@dataclass(eq=False)
class Group:
    """Runs of one configuration, which are repeats of each other.

    tied_with_faster: its spread reaches into that of the next faster group, so that their order means nothing.
    """

    name: str
    rows: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    tied_with_faster: bool = False

    @property
    def ok(self) -> pd.DataFrame:
        return self.rows[self.rows.status == "ok"]

    @property
    def recipe(self) -> str:
        return str(self.rows.recipe.iloc[0])

    def median(self, column: str) -> float | None:
        """Return the median over the runs that succeeded, None if there is no figure."""
        values = self.ok[column].dropna()
        return float(values.median()) if len(values) else None

    def spread(self) -> tuple[float, float] | None:
        """Return the lowest and highest tokens/s of the repeats, or of one run those at its p90 and p10 step times."""
        ok = self.ok.dropna(subset=["tokens_per_s"])
        if len(ok) == 0:
            return None
        if len(ok) > 1:
            return float(ok.tokens_per_s.min()), float(ok.tokens_per_s.max())
        run = ok.iloc[0]
        tokens = run.tokens_per_s * run.step_time_s_median
        return float(tokens / run.step_time_s_p90), float(tokens / run.step_time_s_p10)


@dataclass(eq=False)
class Comparison:
    """Groups of the same work, fastest first, and the groups that are not comparable with them."""

    ranked: list[Group]
    apart: list[Group]
    frame: pd.DataFrame

    @property
    def baseline(self) -> Group | None:
        """Return the group that speeds are relative to: `single`, or else the slowest that ran."""
        with_speed = [g for g in self.ranked if g.median("tokens_per_s") is not None]
        slowest = with_speed[-1] if with_speed else None
        return next((g for g in with_speed if g.recipe == "single"), slowest)


def load(paths: Sequence[Path]) -> pd.DataFrame:
    """Read all rows of results folders, summary files or single runs' folders.

    A run that was resumed, or repeated under its name, has several rows. Only the last counts.
    The column `folder` is the results folder that the run is in.
    """
    import pandas as pd

    rows = pd.concat([_read(path) for path in paths], ignore_index=True)
    if rows.empty:
        raise ConfigError("there are no rows", "in compare", "run `gptscale sweep` first")
    return rows.drop_duplicates(["folder", "run_id"], keep="last", ignore_index=True)


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    is_run = path.absolute().parent.name == "runs"
    home = path.absolute().parent.parent if is_run else path
    file = home / "summary.csv" if home.is_dir() else home
    if not file.is_file():
        raise ConfigError(f"{path} holds no summary.csv", "in compare", "give a results folder or a summary.csv")
    try:
        text = file.read_text()
        # A last line without a newline is still being written, or torn.
        complete_lines = text[: text.rfind("\n") + 1]
        rows = pd.read_csv(io.StringIO(complete_lines), dtype=str, keep_default_na=False)
        rows = rows.assign(**{column: "" for column in NEW_SINCE_1 if column not in rows})
        # fp32 is all that versions 1 to 3 had.
        rows["optimizer_state"] = rows["optimizer_state"].replace("", "fp32")
        rows[NUMBERS] = rows[NUMBERS].apply(pd.to_numeric)
        rows[TEXT] = rows[TEXT].map(lambda text: "".join(c if c.isprintable() else " " for c in text))
    except (ValueError, KeyError) as error:
        reason = str(error).splitlines()[0][:100]
        raise ConfigError(f"{file} is no summary ({reason})", "in compare", "give a file that gptscale wrote") from None
    rows = rows.assign(folder=str(file.parent.resolve()))
    rows = rows.assign(recipe_options=[_recipe_options(row) for row in rows.itertuples()])
    return rows[rows.run_id == path.name] if is_run else rows


def compare(frame: pd.DataFrame, work: str | None = None) -> Comparison:
    """Group repeats, and rank the groups whose workload_hash is `work`.

    work: by default that of the most recipes, and among equals the newest.
    """
    if work is None:
        works = frame.groupby("workload_hash").agg(recipes=("recipe", "nunique"), newest=("timestamp", "max"))
        work = str(works.sort_values(["recipes", "newest"], ascending=False).index[0])
    comparison = Comparison([], [], frame)
    reference = frame[frame.workload_hash == work].iloc[-1]
    for (group_work, *_), rows in frame.groupby(["workload_hash", *CONFIGURATION], sort=False, dropna=False):
        group = Group(_name(rows.iloc[0]), rows)
        if group_work == work:
            comparison.ranked.append(group)
        else:
            comparison.apart.append(group)
            group.notes.append(f"other work: {_differences(reference, rows.iloc[0])}")
        group.notes += [f"{r.status}: {r.error}"[:160] for r in rows.itertuples() if r.status != "ok"]
    comparison.ranked.sort(key=lambda g: -(g.median("tokens_per_s") or 0.0))
    for groups in (comparison.ranked, comparison.apart):
        _make_names_differ(groups)
    _mark_ties(comparison.ranked)
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

    for name in {group.name for group in groups}:
        twins = [group for group in groups if group.name == name]
        firsts = pd.DataFrame([group.rows.iloc[0] for group in twins])
        differing = [column for column in CONFIGURATION if firsts[column].nunique() > 1]
        common = set.intersection(*(set(options.split("\n")) for options in firsts.recipe_options))
        for group in twins:
            own = [o for o in group.rows.recipe_options.iloc[0].split("\n") if o not in common]
            columns = [f"{column}={group.rows[column].iloc[0]}" for column in differing if column != "recipe_options"]
            group.name += "".join(f" {option}" for option in columns + own)


def _differences(reference: Any, row: Any) -> str:
    """Name the parts of the work that differ, by run.json if both runs have it, or else by their columns."""
    a, b = _work_of(reference), _work_of(row)
    if a is None or b is None:
        a, b = ({column: each[column] for column in WORK} for each in (reference, row))
    parts = [f"{k} {b.get(k)} (ranked: {a.get(k)})" for k in {**a, **b} if a.get(k) != b.get(k)]
    return "; ".join(parts) or "in something that only run.json tells, which is gone"


def _work_of(row: Any) -> dict[str, Any] | None:
    run_json = _run_json(row)
    return dict(run_json["workload"]) if run_json else None


def _recipe_options(row: Any) -> str:
    """Return the recipe's own options from run.json, a line each, since runs that differ in one are no repeats."""
    options = (_run_json(row) or {}).get("recipe_config", {})
    return "\n".join(f"{name}={value}" for name, value in sorted(options.items()))


def _run_json(row: Any) -> dict[str, Any] | None:
    """Read what the run wrote when it started, None if its folder is gone."""
    file = Path(row.folder) / "runs" / str(row.run_id) / "run.json"
    return dict(json.loads(file.read_bytes())) if file.is_file() else None


def _mark_ties(ranked: list[Group]) -> None:
    for faster, slower in pairwise(ranked):
        slow, fast = slower.spread(), faster.spread()
        slower.tied_with_faster = slow is not None and fast is not None and slow[1] >= fast[0]
