"""How far is the model of times off on runs that others measured?

python -m benchmarks.foresight.tables --table runs.csv [--calibrate-on small.csv nccl.csv] [--csv predicted.csv]
python -m benchmarks.foresight.tables --table megatron_lm_golden_memory_time.csv --held
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.foresight.tables.check import check
from benchmarks.foresight.tables.megatron_memory import between_machines, read_held, table_of
from benchmarks.foresight.tables.report import summary, write_rows
from benchmarks.foresight.tables.table import read_table
from gptscale.common.settings.checks import check_output_file, refuse_changed
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.results import render


@dataclass(frozen=True)
class TableOptions:
    """Whose runs to predict, and from which."""

    table: Path
    """CSV of runs that others measured. Half of its rows is predicted from the other half, and the other way round."""
    calibrate_on: tuple[Path, ...] = ()
    """Predict all of its rows from these tables instead."""
    csv: Path | None = None
    """The rows with their predictions, as CSV."""
    held: bool = False
    """Predict nothing: the table has Megatron-LM's golden values, and what its tests hold beyond the formula of state is told."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv")
        if self.held:
            refuse_changed(self, ("calibrate_on", "csv"), "--held predicts nothing")


def main(argv: Sequence[str]) -> int:
    """Predict the rows of a table, print the summary, write the rows, and return 0."""
    about = "Predictions beside the steps and bytes that others measured."
    options = parse(TableOptions, argv, prog="python -m benchmarks.foresight.tables", about=about)
    if options.held:
        splits = read_held(options.table)
        render.console(120, highlight=False).print(table_of(splits))
        print(*between_machines(splits), sep="\n")
        return 0
    measured = read_table(options.table)
    others = [read_table(path) for path in options.calibrate_on]
    rows = check(measured, others)
    print(*summary(measured, others, rows), sep="\n")
    if options.csv:
        write_rows(options.csv, measured, rows)
        print(f"{len(rows)} rows in {options.csv}")
    return 0


if __name__ == "__main__":
    sys.exit(start(main))
