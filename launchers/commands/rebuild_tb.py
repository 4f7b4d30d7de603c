"""`gptscale rebuild-tb`: write the TensorBoard events of a run anew from its CSVs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.settings.command_line import parse


@dataclass(frozen=True)
class RebuildOptions:
    """Which runs get new events."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of runs, such as results/runs/NAME."""


def main(argv: Sequence[str]) -> int:
    """Write the events of each run anew, and set the old ones aside."""
    options = parse(RebuildOptions, argv, prog="gptscale rebuild-tb", about="Write TensorBoard events anew from CSVs.")
    from gptscale.results.record.rebuild import rebuild_events
    from gptscale.results.record.run_folder import run_directory

    if not options.runs:
        raise ConfigError("no RUN is given", "in rebuild-tb", "give a run's folder, such as results/runs/NAME")
    for run in options.runs:
        folder = run.absolute()
        if folder.parent.name != "runs" or not (folder / "steps.csv").is_file():
            raise ConfigError(
                f"{run} holds no steps.csv", "in rebuild-tb", "give a run's folder, such as results/runs/NAME"
            )
        # Nothing is rebuilt while the run writes.
        with run_directory(folder.parent.parent, folder.name, resumes=True):
            n = rebuild_events(folder)
        print(f"{run}: events of {n:,} rows", flush=True)
    return 0
