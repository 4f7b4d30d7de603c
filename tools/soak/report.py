"""What a soak prints and writes: a line for each fault, a table of them by recipe, and a CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gptscale.results.render import console, table
from tools.soak.broken_run import FINISHED, Outcome

TITLES = ("recipe", "fault", "faults", "as promised", "exit statuses", "lost bits", "seconds")
CSV_COLUMNS = ("recipe", "run", "options", "fault", "moment", "status", "seconds", "lost_bits", "wrong")


def rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows: each recipe's faults, then each fault of all recipes, then all."""
    faults = [outcome for outcome in outcomes if outcome.fault != FINISHED]
    for recipe in dict.fromkeys(outcome.recipe for outcome in faults):
        of_recipe = [outcome for outcome in faults if outcome.recipe == recipe]
        yield from (_row(recipe, kind, group) for kind, group in _by_kind(of_recipe))
    yield from (_row("all", kind, group) for kind, group in _by_kind(faults))
    yield _row("all", "all", faults)


def lost(outcomes: Iterable[Outcome]) -> int:
    """Return the bits that all runs together have lost, each run counted once."""
    return sum({(outcome.recipe, outcome.run): outcome.lost_bits for outcome in outcomes}.values())


def as_promised(outcomes: Sequence[Outcome]) -> bool:
    """Return whether nothing was lost and every end was as it should be."""
    return not lost(outcomes) and not any(outcome.wrong for outcome in outcomes)


def line(outcome: Outcome) -> str:
    """Return one line about an outcome."""
    what = f"{outcome.fault} at {outcome.moment}" if outcome.moment else outcome.fault
    wrong = "".join(f"\n    WRONG: {each}" for each in outcome.wrong)
    lost = f"\n    LOST: {outcome.lost_bits} bits" if outcome.lost_bits else ""
    run = f"{outcome.run} ({outcome.options or 'plain'})"
    return f"{run}: {what}: status {outcome.status} after {outcome.seconds:.1f} s{wrong}{lost}"


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    left = ("recipe", "fault", "exit statuses")
    console(140).print(table(TITLES, rows(outcomes), left=left, no_wrap=TITLES))


def append(outcomes: Iterable[Outcome], path: Path) -> None:
    """Append the outcomes to a CSV, with its header if it is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        if is_new:
            writer.writeheader()
        for outcome in outcomes:
            row = {"seconds": f"{outcome.seconds:.3f}", "wrong": "; ".join(outcome.wrong)}
            writer.writerow(vars(outcome) | row)


def _by_kind(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    kinds = sorted({outcome.fault for outcome in outcomes})
    return [(kind, [outcome for outcome in outcomes if outcome.fault == kind]) for kind in kinds]


def _row(recipe: str, kind: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    statuses = Counter(str(outcome.status) for outcome in outcomes)
    endings = ", ".join(f"{status} ({count})" for status, count in sorted(statuses.items()))
    good = sum(not outcome.wrong for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return recipe, kind, str(len(outcomes)), str(good), endings, f"{lost(outcomes):,}", f"{seconds:.1f}"
