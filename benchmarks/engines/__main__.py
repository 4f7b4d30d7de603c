"""What our layer adds to each engine, against the engine's own minimal loop: `python -m benchmarks.engines`.

Both run in the same processes on the same model and batch, in turn, a block of steps each, so that a drifting machine weighs on
both alike. Ours does all that a run does: tokens read ahead, engine, CSV, console. The other reads its loss and does no more.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measurement import collect, print_written, tell
from benchmarks.quiet import QuietOptions, quiet_machine
from gptscale.common.errors import ConfigError
from gptscale.common.process.program import Program
from gptscale.common.settings.checks import check_output_file, check_ranges
from gptscale.common.settings.command_line import parse
from gptscale.launchers.cli import start
from gptscale.results import render

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class EnginesOptions(QuietOptions):
    """Which engines, how long."""

    recipes: str = "all"
    """Names with commas between, or all that can run here and have a minimal loop to compare with."""
    nproc: int = 2
    """Processes."""
    rounds: int = 12
    """Blocks of 4 steps for each of the two, after one that is not counted."""
    model: str = "tiny"
    """Preset."""
    n_embd: int = 256
    """Hidden size. The default is wide enough that on a CPU a step lasts long beside the noise."""
    csv: Path | None = None
    """File for the figures."""

    def __post_init__(self) -> None:
        check_ranges(self, {"nproc": (1, 1024), "rounds": (1, 1000)})
        check_output_file(self.csv, "--csv", "cannot be written")


def main(argv: Sequence[str]) -> int:
    """Measure each engine in a world of its own, print, write, and return 0."""
    about = "Our layer against each engine's own loop."
    options = parse(EnginesOptions, argv, prog="python -m benchmarks.engines", about=about)
    # After the options are parsed, because they import torch.
    from benchmarks.engines.minimal_splits import LIBRARY_SETUPS, SETUPS
    from benchmarks.engines.worker import run_words
    from gptscale.launchers.run.options import parse_run
    from gptscale.launchers.run.preflight import why_not_here
    from gptscale.launchers.run.start import plan_run

    with_loops = [*SETUPS, *LIBRARY_SETUPS]
    names = [n for n in with_loops if not why_not_here(n)] if options.recipes == "all" else options.recipes.split(",")
    unknown = [name for name in names if name not in with_loops]
    if unknown:
        raise ConfigError(f"{unknown[0]} has no minimal loop", "in --recipes", "use one of: " + " ".join(with_loops))
    # Whatever a rank would refuse is refused here, in one line and before the first world.
    folder = Path(tempfile.gettempdir())
    for name in names:
        words = run_words(name, options.rounds, options.model, options.n_embd, folder)
        plan_run(name, *parse_run(name, words), options.nproc)
    with quiet_machine(options, "benchmarks.engines"):
        show(collect(measure(names, options), options.csv))
        print_written(options.csv)
    return 0


def measure(names: Sequence[str], options: EnginesOptions) -> Iterator[dict[str, Any]]:
    """Launch a world for each engine, and yield the row that its rank 0 left."""
    from gptscale.common.process.ranks import launch
    from gptscale.common.process.world import runs_on_cuda
    from gptscale.recipes import get

    for name in names:
        tell(f"{name} ...")
        with tempfile.TemporaryDirectory() as folder:
            task = json.dumps([name, options.rounds, options.model, options.n_embd, folder])
            row = get(name)
            program = Program("benchmarks.engines.worker", (task,), row.environment, imports=row.imports)
            if launch(program, options.nproc, fork=not runs_on_cuda("auto")):
                raise ConfigError(f"{name} failed", "in benchmarks.engines", "see its own message above")
            yield {"recipe": name, **json.loads((Path(folder) / "row.json").read_text())}


def show(frame: pd.DataFrame) -> None:
    """Print the table."""
    table = render.table(["recipe", "its own loop ms", "ours ms", "ratio", "ratio p10-p90"])
    for row in frame.to_dict("records"):
        spread = f"{row['ratio_p10']:.3f}-{row['ratio_p90']:.3f}"
        times = (f"{row[k] * 1e3:,.1f}" for k in ("bare_step_s", "our_step_s"))
        table.add_row(str(row["recipe"]), *times, f"{row['ratio']:.3f}", spread)
    render.console(100).print(table)
    print(f"{frame.device[0]}, torch {frame.torch_version[0]}; ratio: median over pairs of blocks run in turn")


if __name__ == "__main__":
    sys.exit(start(main))
