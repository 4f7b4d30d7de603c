"""Say in a few lines how far predictions are off, and write each row with its prediction."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.foresight.tables.check import MARGIN, CheckedRow, Choice, choices, percentiles
from benchmarks.foresight.tables.table import MeasuredTable
from gptscale.common.errors import StorageError

# A choice is good if it is slower than the best measured one by at most this.
GOOD_CHOICE = 0.1
# Columns that a row gains, behind its own.
ADDED = (
    "measured_s",
    "predicted_s",
    "low_s",
    "high_s",
    "error",
    "grade",
    "refused",
    "predicted_memory_gb",
    "fits",
    "recommended",
)


def summary(table: MeasuredTable, others: Sequence[MeasuredTable], rows: Sequence[CheckedRow]) -> list[str]:
    """Return the lines that `python -m benchmarks.foresight.tables --table` prints."""
    from_what = ", ".join(str(other.path) for other in others) or "each half from the other"
    lines = [f"{table.path}: {len(rows)} rows, {table.profile.about}; predicted from {from_what}"]
    measured = [row for row in rows if row.run.seconds is not None]
    errors = [row.error for row in rows if row.error is not None]
    share = f" ({len(errors) / len(measured):.1%})" if measured else ""
    lines.append(f"  answered  {len(errors)} of {len(measured)} rows with a time{share}")
    if errors:
        median, p95, worst = percentiles(errors)
        within = sum(row.low_s <= row.run.seconds <= row.high_s for row in rows if row.error is not None)  # type: ignore[operator]
        lines.append(f"  error     median {median:.2%}   95th percentile {p95:.2%}   worst {worst:.2%}")
        lines.append(f"  interval  {within / len(errors):.0%} of the rows lie in their interval of 90 %")
        grades = Counter(row.grade for row in rows if row.error is not None)
        lines.append("  grade     " + ", ".join(f"{n} {grade}" for grade, n in grades.most_common()))
    refused = Counter(_reason(row) for row in rows if row.refused)
    lines += [f"  refused   {n}: {reason}" for reason, n in refused.most_common(4)]
    return lines + _memory_lines(rows) + (_choice_lines(choices(rows)) if table.profile.choices else [])


def write_rows(path: Path, table: MeasuredTable, rows: Sequence[CheckedRow]) -> None:
    """Write every row of the table with its prediction behind it."""
    recommended = {id(choice.row) for choice in choices(rows)} if table.profile.choices else set()
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*table.titles, *ADDED])
            for row in rows:
                own = [row.cells[title] for title in table.titles]
                seconds = (row.run.seconds, row.predicted_s, row.low_s, row.high_s, row.error)
                figures = ["" if value is None else f"{value:.6g}" for value in seconds]
                memory = "" if row.predicted_gb is None else f"{row.predicted_gb:.3f}"
                fits = "" if row.fits is None else str(row.fits)
                writer.writerow([*own, *figures, row.grade, row.refused, memory, fits, str(id(row) in recommended)])
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror})", "in --csv", "give another file") from None


def _reason(row: CheckedRow) -> str:
    """Return why a row is refused, without its figures."""
    return row.refused.split(" (")[0].split(" is known")[0]


def _memory_lines(rows: Sequence[CheckedRow]) -> list[str]:
    judged = [row for row in rows if row.fits is not None]
    ran = [row for row in judged if row.run.seconds is not None]
    if not ran:
        return []
    failed = [row for row in judged if row.run.seconds is None]
    misjudged = sum(bool(row.fits) and not row.run.cannot_start for row in failed)
    lines = [
        f"  fits      {sum(bool(row.fits) for row in ran) / len(ran):.1%} of the {len(ran)} runs that ran are called fitting",
        f"            {misjudged} of the {len(failed)} that failed, for whatever reason, are called fitting too",
    ]
    with_memory = [row for row in ran if row.run.measured_gb]
    if with_memory:
        median, p95, worst = percentiles(row.predicted_gb / row.run.measured_gb - 1 for row in with_memory)  # type: ignore[operator]
        lines.append(f"  memory    median {median:.1%}   95th percentile {p95:.1%}   worst {worst:.1%}")
    return lines


def _choice_lines(choices: Sequence[Choice]) -> list[str]:
    if not choices:
        return []
    good = sum(choice.gap <= GOOD_CHOICE for choice in choices)
    failed = [choice for choice in choices if choice.row.run.seconds is None]
    median, p95, worst = percentiles(choice.gap for choice in choices)
    lines = [
        f"  choice    {good} of {len(choices)} groups: the recommended row is within {GOOD_CHOICE:.0%} of the best measured one",
        f"            slower than the best by median {median:.1%}   95th percentile {p95:.1%}   worst {worst:.1%}",
        f"            recommended although it failed: {len(failed)}"
        + "".join(f"; {choice.group} ({choice.row.used:.0%} of memory)" for choice in failed[:3]),
    ]
    if any(choice.row.run.memory for choice in choices):
        lines.append(f"            (only rows up to {MARGIN:.1%} of the device's memory are recommended)")
    return lines
