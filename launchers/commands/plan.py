"""`gptscale plan`: predict the time of steps, and check the predictions on runs that others measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse


@dataclass(frozen=True)
class PlanOptions:
    """What to predict."""

    check: Path | None = None
    """A table of measured runs. Each half of it is predicted from the other half."""
    calibrate_on: tuple[Path, ...] = ()
    """With --check: predict all of its rows from these tables instead."""
    csv: Path | None = None
    """With --check: the rows with their predictions, as CSV."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv")


def main(argv: Sequence[str]) -> int:
    """Check predictions on a table, print how far off they are, and write them."""
    options = parse(PlanOptions, argv, prog="gptscale plan", about="Predict steps, and check it on measured runs.")
    if options.check is None:
        raise ConfigError("no table is given", "in plan", "use --check FILE.csv with runs that were measured")
    return _check(options.check, options)


def _check(file: Path, options: PlanOptions) -> int:
    """Predict the rows of a table, print the summary, and write the rows."""
    from gptscale.foresight.tables.check import check
    from gptscale.foresight.tables.report import summary, write_rows
    from gptscale.foresight.tables.table import read_table

    measured = read_table(file)
    others = [read_table(path) for path in options.calibrate_on]
    rows = check(measured, others)
    for line in summary(measured, others, rows):
        print(line)
    if options.csv:
        write_rows(options.csv, measured, rows)
        print(f"{len(rows)} rows in {options.csv}")
    return 0
