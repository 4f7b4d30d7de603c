"""Is the time that `gptscale plan --here` predicts the time that a run takes?

    python -m benchmarks.foresight.times [--recipes A,B] [--shapes narrow,wide,deep] [--csv FILE]

Each recipe runs on two ranks of this machine's processors. Its layers, timed alone in models of one and of three blocks, and its
messages give the prediction; no run that is predicted is calibrated on. Both are measured in turn, round by round, so that a
drifting machine weighs on both alike.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import collect, print_written, tell
from benchmarks.quiet import QuietOptions, quiet_machine
from gptscale.common.errors import ConfigError, DataError, GptscaleError
from gptscale.common.process.program import Program
from gptscale.common.process.warm_parent import begin_warm_parent
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.user_file import read_table
from gptscale.launchers.cli import start
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd

NPROC = 2
FILE_BYTES_MAX = 2**26


@dataclass(frozen=True)
class PlanBenchOptions(QuietOptions):
    """Which recipes and shapes, and how often."""

    recipes: str = "all"
    """Names with commas between, or all that run on this CPU in this environment."""
    shapes: str = "all"
    """narrow,wide,deep, or all."""
    rounds: int = 12
    """Blocks of 4 steps of each recipe, of which the first warms up."""
    calibration: Path | None = None
    """File that the calibration is added to. Default: a file that is deleted at the end."""
    csv: Path | None = None
    """File that grows by the rows of a shape. What it has already is not measured again."""

    def __post_init__(self) -> None:
        check_ranges(self, {"rounds": (5, 1000)})
        check_output_file(self.csv, "--csv", "cannot be written")
        check_output_file(self.calibration, "--calibration", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Calibrate, run, compare, print, and return 0."""
    about = "Predicted step times of every recipe on this CPU, beside measured ones."
    options = parse(PlanBenchOptions, argv, prog="python -m benchmarks.foresight.times", about=about)
    begin_warm_parent("cpu", imports=["gptscale.launchers.run.start"])
    # After the options are parsed, because they import torch.
    from benchmarks.foresight.times.shapes import SHAPES, shape_named

    names = list(SHAPES) if options.shapes == "all" else options.shapes.split(",")
    shapes = {name: shape_named(name) for name in names}
    with quiet_machine(options, "benchmarks.foresight.times"), tempfile.TemporaryDirectory() as folder:
        calibration = options.calibration or Path(folder) / "calibration.json"
        rows = measured_before(options.csv)
        todo = {shape: [r for r in recipes_of(options) if (shape, r) not in rows] for shape in shapes}
        new = measure(todo, shapes, options.rounds, calibration.absolute())
        frame = collect(itertools.chain(rows.values(), new), options.csv)
        show(frame)
        print_written(options.csv, options.calibration)
    return 0


def recipes_of(options: PlanBenchOptions) -> list[str]:
    """Return the recipes to run, or raise ConfigError for one that cannot."""
    from gptscale.launchers.run.preflight import why_not_here
    from gptscale.recipes import RECIPES, get

    def reason(name: str) -> str | None:
        if get(name).environment:
            return "it runs in another environment"
        return get(name).own_work or why_not_here(name, cuda=False)

    if options.recipes == "all":
        for name in RECIPES:
            if why := reason(name):
                tell(f"leaving out {name}: {why}")
        return [name for name in RECIPES if not reason(name)]
    names = options.recipes.split(",")
    for name in names:
        if why := reason(name):
            raise ConfigError(f"{name} cannot be compared here: {why}", "in --recipes", "leave it out")
    return names


def measured_before(csv: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows that a file has, by shape and recipe."""
    if csv is None or not csv.exists():
        return {}
    import pandas as pd

    def refuse(reason: str) -> DataError:
        what = f"{csv} has no rows of this bench ({reason})"
        return DataError(what, "in --csv", "give the file that it wrote, or another name")

    try:
        frame = pd.read_csv(io.StringIO(read_table(csv, FILE_BYTES_MAX, refuse)))
        rows: list[Any] = frame.to_dict("records")
        return dict(zip(zip(frame["shape"], frame["recipe"], strict=True), rows, strict=True))
    except (ValueError, KeyError) as error:
        raise refuse(type(error).__name__) from error


def measure(
    todo: dict[str, list[str]], shapes: dict[str, dict[str, int]], rounds: int, calibration: Path
) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape and recipe. A recipe that splits nothing has the machine for itself.

    todo: the recipes of each shape.
    """
    from gptscale.recipes import get

    for shape_name, shape in shapes.items():
        for nproc in (NPROC, 1):
            names = [name for name in todo[shape_name] if bool(get(name).axes) == (nproc > 1)]
            if names:
                tell(f"{shape_name}: {', '.join(names)} ...")
                yield from rows_of(names, shape_name, shape, nproc, rounds, calibration)


def rows_of(
    names: Sequence[str], shape_name: str, shape: dict[str, int], nproc: int, rounds: int, calibration: Path
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one world."""
    from gptscale.common.process.ranks import launch

    with tempfile.TemporaryDirectory() as folder:
        task = {"recipes": names, "shape": shape, "rounds": rounds, "folder": folder, "calibration": str(calibration)}
        program = Program("benchmarks.foresight.times.worker", (json.dumps(task),))
        if launch(program, nproc):
            raise GptscaleError(
                f"{shape_name} on {nproc} ranks failed", "in benchmarks.foresight.times", "see its own message above"
            )
        for row in json.loads((Path(folder) / "rows.json").read_text()):
            predicted = predict(row["recipe"], shape, nproc, row["threads"], Path(folder), calibration)
            error = predicted["predicted_s"] / row["measured_s"] - 1
            yield {"shape": shape_name, **shape, "ranks": nproc, **row, **predicted, "error": error}


def predict(
    recipe: str, shape: dict[str, int], nproc: int, threads: int, folder: Path, calibration: Path
) -> dict[str, Any]:
    """Return the predicted step of a recipe, from the same work that `gptscale plan --here` plays."""
    import torch

    from benchmarks.foresight.times.shapes import plan_of
    from gptscale.common.process.world import world_of
    from gptscale.foresight.calibrate.costs import cost_table
    from gptscale.foresight.calibrate.machine import this_machine
    from gptscale.foresight.calibrate.steps import step_here
    from gptscale.foresight.time.data_sheets import GLOO, HERE

    plan = plan_of(recipe, shape, 1, folder, world_of("cpu", None, nproc))
    step = step_here(plan.run, plan.recipe_config)
    machine = this_machine(torch.device("cpu"), nproc)._replace(threads=threads)
    prediction = cost_table(step.operations(), HERE, GLOO, calibration, machine=machine).predict(step)
    return {"predicted_s": prediction.seconds, "spread": prediction.spread, "grade": prediction.grade}


def show(frame: pd.DataFrame) -> None:
    """Print the table, the errors, and how far the recommended recipe is from the best measured one."""
    table = render.table(["shape", "recipe", "ranks", "predicted ms", "measured ms", "p10-p90", "error", "grade"])
    for row in frame.to_dict("records"):
        span = f"{row['measured_p10_s'] * 1e3:,.1f}-{row['measured_p90_s'] * 1e3:,.1f}"
        times = (f"{row[k] * 1e3:,.1f}" for k in ("predicted_s", "measured_s"))
        table.add_row(
            str(row["shape"]), str(row["recipe"]), str(row["ranks"]), *times, span, f"{row['error']:+.1%}", row["grade"]
        )
    console = render.console(130, highlight=False)
    console.print(table)
    sizes = frame.error.abs()
    figures = f"median {sizes.median():.1%}, 95th percentile {sizes.quantile(0.95):.1%}, worst {sizes.max():.1%}"
    console.print(f"error over {len(frame)} rows: {figures}")
    for shape, rows in frame.groupby("shape", sort=False):
        recommended, best = (rows.sort_values(by).iloc[0] for by in ("predicted_s", "measured_s"))
        gap = recommended.measured_s / best.measured_s - 1
        console.print(
            f"{shape}: recommended {recommended.recipe}, best measured {best.recipe}, {gap:.1%} slower than the best"
        )
    console.print(f"others took up to {frame.taken_fraction.max():.0%} of the processors")


if __name__ == "__main__":
    sys.exit(start(main))
