"""The command `gptscale bench verdict`: causes put into runs on purpose, what verdicts say, and what a cure gives.

Each case is a run with the cause between two without it. A row is written when it is measured. A later call with the same --csv
goes on.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import ConfigError
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_output_file, check_path, check_ranges, parse_names
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.run_config import VERDICT_STEPS_MIN
from gptscale.launchers.bench.measurement import print_written, tell
from gptscale.launchers.bench.quiet import QuietOptions


@dataclass(frozen=True)
class VerdictBenchOptions(QuietOptions):
    """Which causes in which recipes, and how often."""

    causes: str = "all"
    """Causes with commas between, such as 'slow reader,healthy', or all."""
    recipes: str = "all"
    """Recipes with commas between, or all."""
    repeats: int = 3
    """Runs of each case."""
    steps: int = VERDICT_STEPS_MIN
    """Optimizer steps of a run."""
    csv: Path | None = None
    """File that grows by a row after each case. What it has already is not run again."""
    minutes: float | None = None
    """Begin no further case after so many minutes. A later call with the same --csv goes on."""

    verdicts: Path | None = None
    """Folder that gets the verdict of each case, for gptscale why FOLDER/CASE."""

    def __post_init__(self) -> None:
        check_ranges(self, {"repeats": (1, 1000), "steps": (VERDICT_STEPS_MIN, 10_000), "minutes": (0.0, 10_000.0)})
        check_output_file(self.csv, "--csv", "cannot be written")
        if self.verdicts is not None:
            check_path(self.verdicts, "--verdicts")


def main(argv: Sequence[str]) -> int:
    """Run the cases that are left, print the table with the goals, and return 1 if one was missed."""
    options = parse(VerdictBenchOptions, argv, prog="gptscale bench verdict", about="Injected causes beside verdicts.")
    begin_warm_parent("cpu", imports=["gptscale.launchers.run.worker"])
    from gptscale.launchers.bench.verdict.cases import InjectedCase, cases
    from gptscale.launchers.bench.verdict.report import compared, read, show, write
    from gptscale.launchers.bench.verdict.runs import RunsOfABench

    every = list(cases())
    chosen = {
        name: set(parse_names(text, list(dict.fromkeys(getattr(c, name) for c in every)), name, f"--{name}s"))
        if (text := getattr(options, f"{name}s")) != "all"
        else {getattr(c, name) for c in every}
        for name in ("cause", "recipe")
    }
    cases_to_run: list[InjectedCase] = [c for c in every if c.cause in chosen["cause"] and c.recipe in chosen["recipe"]]
    if not cases_to_run:
        raise ConfigError("no case has these causes and recipes", "in bench verdict", "leave --recipes out")
    rows = read(options.csv)
    done = {(row["cause"], row["recipe"], int(row["repeat"])) for row in rows}
    runs = RunsOfABench(options.steps, options.allow_busy, options.verdicts)
    began = time.monotonic()
    left = [(r, c) for r in range(options.repeats) for c in cases_to_run if (c.cause, c.recipe, r) not in done]
    for n, (repeat, case) in enumerate(left):
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            tell(f"... {len(left) - n} cases were left, call again with the same --csv")
            break
        tell(f"{case.name} {repeat + 1}/{options.repeats} ...")
        row = {"date": datetime.date.today().isoformat(), "repeat": repeat} | compared(
            case, *runs.of_case(case, repeat)
        )
        rows.append(row)
        write(options.csv, rows)
    shown = [row for row in rows if row["cause"] in chosen["cause"] and row["recipe"] in chosen["recipe"]]
    if not shown:
        print("no case was measured")
        return 1
    status = show(shown)
    print_written(options.csv)
    return status
