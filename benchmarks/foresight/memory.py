"""How much memory do programs of others need? What the mock of CUDA says stands beside what their authors published.

python -m benchmarks.foresight.memory --programs FILE

FILE is a CSV with a row for each: what, folder (of the checkout), options and command (of `gptscale simulate options --
command`), figure (allocated or reserved), and gib.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptscale.common.errors import DataError, GptscaleError
from gptscale.common.measure.gpus import GIB
from gptscale.common.settings.command_line import parse
from gptscale.common.settings.user_file import read_rows
from gptscale.foresight.simulate.own_program import ProgramOptions
from gptscale.launchers.cli import start

FILE_BYTES_MAX = 2**26
PROGRAM = ("what", "folder", "options", "command", "figure", "gib")


@dataclass(frozen=True)
class ProgramsOptions:
    """Which programs to simulate."""

    programs: Path
    """A CSV of programs of others and what they published."""


def programs_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV of programs, or raise DataError if it is none."""

    def refuse(reason: str) -> DataError:
        fix = "see python -m benchmarks.foresight.memory"
        return DataError(f"{file} has no programs ({reason})", "in --programs", fix)

    return read_rows(file, FILE_BYTES_MAX, refuse, PROGRAM)


def main(argv: Sequence[str]) -> int:
    """Print a line for each program of others, and return 1 if one did not make its steps."""
    about = "Programs of others under the mock of CUDA beside what their authors published."
    file = parse(ProgramsOptions, argv, prog="python -m benchmarks.foresight.memory", about=about).programs
    failed = 0
    for row in programs_of(file):
        options = parse(ProgramOptions, shlex.split(row["options"]), prog="options")
        try:
            simulation = options.simulate(shlex.split(row["command"]), options.rank, Path(row["folder"]))
        except GptscaleError as error:
            failed += 1
            print(f"{row['what']}: {error}", flush=True)
            continue
        simulated, published = getattr(simulation.memory(), row["figure"]) / GIB, float(row["gib"])
        print(
            f"{row['what']}: {row['figure']} {published:.2f} GiB published, {simulated:.2f} simulated, "
            f"{simulated / published - 1:+.1%}, torch {simulation.facts['torch']}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(start(main))
