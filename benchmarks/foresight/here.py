"""Plans of this machine's processor beside runs of the same rows: how far off, and is the fastest one recommended?

    python -m benchmarks.foresight.here --csv here.csv [--models tiny,llama-tiny] [--seq-lens 64,128] [--rounds 2] [--rows 20]

A plan trains each row for a few steps (`gptscale plan --here`). Then each row is trained for 20 timed steps, and is planned and
trained again in each further round. What others on the machine disturb is run again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.foresight.split_times import AS_GOOD
from benchmarks.measurement import collect, print_written, tell
from gptscale.common.errors import GptscaleError
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.foresight.plan.options import PlanOptions
from gptscale.foresight.plan.planning import cluster_of, plan_for
from gptscale.foresight.plan.rows import PlannedRow, Tried
from gptscale.foresight.plan.trials import CONTENDED, measured
from gptscale.launchers.cli import start
from gptscale.recipes import RECIPES

TIMED, TRIES = 20, 5


@dataclass(frozen=True)
class HereOptions:
    """The work, and how often it is planned and run."""

    csv: Path | None = None
    """A row for each split and round."""
    models: str = "tiny,llama-tiny"
    """Presets with commas between."""
    seq_lens: str = "64,128"
    """Tokens per sequence, with commas between."""
    recipes: str = "all"
    """Names with commas between."""
    rounds: int = 2
    """How often each row is planned and run."""
    rows: int = 20
    """Rows of a plan."""
    nproc: int = 2
    """Processes."""

    def __post_init__(self) -> None:
        check_output_file(self.csv, "--csv", "cannot be written")


def rows(options: HereOptions) -> Iterator[dict[str, Any]]:
    """Yield the planned and the measured step of each row and round."""
    names = list(RECIPES) if options.recipes == "all" else options.recipes.split(",")
    for model in options.models.split(","):
        for seq_len in map(int, options.seq_lens.split(",")):
            work = PlanOptions(model=model, seq_len=seq_len, here=True, nproc=options.nproc, rows=options.rows)
            plan = plan_for(work, cluster_of(work), names)
            for row in plan.rows:
                planned = row.timing
                for number in range(options.rounds):
                    try:
                        planned = _quiet(row) if number or planned.grade == CONTENDED else planned
                        found = _quiet(replace(row, tried=None), TIMED)
                    except GptscaleError as error:
                        tell(f"{row.name}: {error}")
                        break
                    off = planned.seconds / found.seconds - 1
                    tell(
                        f"{model} {seq_len}: {row.name}: planned {planned.seconds:.4f} s, run {found.seconds:.4f} s, {off:+.1%}"
                    )
                    told = {"model": model, "seq_len": seq_len, "row": row.name, "round": number}
                    yield told | {"planned_s": planned.seconds, "run_s": found.seconds}


def _quiet(row: PlannedRow, *timed: int) -> Tried:
    """Return a run of a row that others did not disturb, or raise GptscaleError."""
    for _ in range(TRIES):
        found = measured(row, *timed)
        if found.grade != CONTENDED:
            return found
        tell(f"{row.name}: again, since others used the machine")
    raise GptscaleError(f"the machine stays busy in {TRIES} runs", "in this bench", "call again when it is quiet")


def main(argv: Sequence[str]) -> int:
    """Plan and run, print how far the plans are off, and return 1 if nothing ran."""
    about = "Plans of this machine's processor beside runs."
    options = parse(HereOptions, argv, prog="python -m benchmarks.foresight.here", about=about)
    frame = collect(rows(options), options.csv)
    print_written(options.csv)
    if frame.empty:
        return 1
    off = (frame.planned_s / frame.run_s - 1).abs()
    print(
        f"{len(frame)} plans: median {off.median():.1%} off, 95 % within {off.quantile(0.95):.1%}, worst {off.max():.1%}"
    )
    good, groups = 0, 0
    for _, group in frame.groupby(["model", "seq_len", "round"]):
        recommended = group.sort_values("planned_s").run_s.iloc[0]
        good, groups = good + (recommended <= AS_GOOD * group.run_s.min()), groups + 1
    print(f"the row that is planned fastest runs within {AS_GOOD - 1:.0%} of the fastest in {good} of {groups} plans")
    return 0


if __name__ == "__main__":
    sys.exit(start(main))
