"""What `gptscale bench verdict` says of its rows: how often the word was right, and promised gains beside real ones."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptscale.common.errors import ConfigError
from gptscale.foresight.verdict.remedies import CAUSES
from gptscale.results.record.files import replace_file

RIGHT, WRONG, GAIN_MEDIAN, GAIN_P95 = 0.95, 0.01, 0.10, 0.20
Row = Mapping[str, Any]
CURE = ("promised_ms", "cured_ms", "promised_gain", "real_gain", "drift")
COLUMNS = (
    *(
        "date",
        "repeat",
        "cause",
        "recipe",
        "expected",
        "said",
        "right",
        "late_rank",
        "step_ms",
        "spread",
        "taken",
        "foreign",
    ),
    *CURE,
)


def compared(case: Any, slow: Row, cured: Sequence[Row]) -> dict[str, Any]:
    """Return the row of a case: what its verdict says, and what it promises beside the mean of its runs without the cause."""
    said, step_s = slow["bound_by"], float(slow["step_time_s_median"])
    row: dict[str, Any] = {"cause": case.cause, "recipe": case.recipe, "expected": case.word, "said": said}
    row |= {"right": said == case.word if case.word else said not in CAUSES, "late_rank": slow["late_rank"]}
    row |= {"step_ms": 1e3 * step_s, "spread": slow["spread"]}
    row |= {"taken": slow["taken_fraction"], "foreign": slow["foreign"]}
    row |= dict.fromkeys(CURE, "")
    cause = next((c for c in slow["causes"] if c["name"] == case.word), None)
    if cured and cause is not None:
        promised_s = slow["remedied_s"] if slow["remedied_s"] is not None and said == case.word else cause["without_s"]
        # For as many tokens as a slow step has.
        cured_s = statistics.fmean(token_time_s(run) for run in cured) * tokens_of_step(slow)
        row |= {"promised_ms": 1e3 * promised_s, "cured_ms": 1e3 * cured_s, "drift": drift(cured)}
        row |= {"promised_gain": 1 - promised_s / step_s, "real_gain": 1 - cured_s / step_s}
    return row


def token_time_s(row: Row) -> float:
    """Return the median seconds of a run's steps for each token."""
    return float(row["step_time_s_median"]) / tokens_of_step(row)


def drift(cured: Sequence[Row]) -> float:
    """Return how far apart the runs without the cause are, as a part of their mean: what the machine itself changed."""
    times_s = [token_time_s(run) for run in cured]
    return (max(times_s) - min(times_s)) / statistics.fmean(times_s)


def tokens_of_step(row: Row) -> float:
    """Return the tokens of a step of a run."""
    return float(row["tokens_total"]) / float(row["steps"])


def read(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a CSV, none if there is none."""
    if path is None or not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [row | {"right": row["right"] == "True"} for row in csv.DictReader(file) if row.get("right")]
    if rows and tuple(rows[0]) != COLUMNS:
        raise ConfigError("its columns are those of another version", f"in {path}", "give --csv another name")
    return rows


def write(path: Path | None, rows: Sequence[Row]) -> None:
    """Write all rows to a CSV, whole or not at all, so that a bench that is cut short leaves what it measured."""
    if path is None:
        return
    content = io.StringIO()
    writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, content.getvalue().encode())


def gain_error(row: Row) -> float | None:
    """Return how far the promised gain is from the real one, as a part of the real one. None without a cure that gains."""
    if row["real_gain"] in ("", None) or float(row["real_gain"]) <= 0:
        return None
    return abs(float(row["promised_gain"]) / float(row["real_gain"]) - 1)


def step_error(row: Row) -> float | None:
    """Return how far the promised step is from the cured one, as a part of the cured one. None without a cure."""
    return abs(float(row["promised_ms"]) / float(row["cured_ms"]) - 1) if row["cured_ms"] not in ("", None) else None


def p95(errors: Sequence[float]) -> float:
    """Return the error that 95 of 100 do not exceed."""
    return sorted(errors)[max(0, -(-len(errors) * 19 // 20) - 1)]


def show(rows: Sequence[Row]) -> int:
    """Print a row for each cause and the goals, and return 1 if one is missed."""
    from gptscale.results.render import console, table

    heads = ("cause", "runs", "right", "wrong", "none", "promised", "real", "gain off", "p95", "step off")
    printed = table(heads, left=("cause",))
    for cause in dict.fromkeys(row["cause"] for row in rows):
        of_cause = [row for row in rows if row["cause"] == cause]
        right = sum(row["right"] for row in of_cause)
        wrong = sum(not row["right"] and row["said"] in CAUSES for row in of_cause)
        counts = (len(of_cause), right, wrong, len(of_cause) - right - wrong)
        printed.add_row(cause, *map(str, counts), *_gains(of_cause))
    console(100).print(printed)
    goals = goals_of(rows)
    for line, met in goals.items():
        print(f"{'met   ' if met else 'missed'}  {line}")
    return int(not all(goals.values()))


def _gains(rows: Sequence[Row]) -> list[str]:
    """Return the median gains that were promised and were real, how far those are off, and how far the steps are."""
    cured = [row for row in rows if gain_error(row) is not None]
    if not cured:
        return ["-"] * 5
    errors = [e for row in cured if (e := gain_error(row)) is not None]
    steps = [e for row in cured if (e := step_error(row)) is not None]
    gains = [statistics.median(float(row[name]) for row in cured) for name in ("promised_gain", "real_gain")]
    return [f"{share:.1%}" for share in (*gains, statistics.median(errors), p95(errors), statistics.median(steps))]


def goals_of(rows: Sequence[Row]) -> dict[str, bool]:
    """Return each goal in words, and whether it is met."""
    n, right = len(rows), sum(row["right"] for row in rows)
    wrong = sum(not row["right"] and row["said"] in CAUSES for row in rows)
    in_healthy = sum(row["said"] in CAUSES for row in rows if not row["expected"])
    gains = [e for row in rows if (e := gain_error(row)) is not None]
    steps = [e for row in rows if (e := step_error(row)) is not None]
    goals = {
        f"right word in {right} of {n} (goal: 95 %)": right >= RIGHT * n,
        f"wrong word in {wrong} of {n} (goal: 1 %)": wrong <= WRONG * n,
        f"a word in {in_healthy} healthy runs (goal: 0)": not in_healthy,
    }
    for what, errors in (("gains beside real ones", gains), ("steps beside cured ones", steps)):
        if errors:
            median, most = statistics.median(errors), p95(errors)
            line = f"promised {what}: median {median:.1%} off, p95 {most:.1%} (goals: 10 %, 20 %)"
            goals[line] = median <= GAIN_MEDIAN and most <= GAIN_P95
    return goals
