"""`gptscale compare`: rank runs of the same work, and write the table to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse

# The lab that compares vision runs. It is found by its name, because nothing here depends on it.
LAB = "gptscale.lenet.studies.compare"


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, and where else the table goes.

    With no file it is only printed.
    """

    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Results folders, summary.csv files, folders of single runs, or results folders and lenet.csv files of vision runs."""
    csv: Path | None = None
    """The aggregated figures as CSV."""
    md: Path | None = None
    """The table as Markdown."""
    png: Path | None = None
    """Loss curves, speed and memory as a picture."""
    html: Path | None = None
    """One self-contained page with all of it."""

    def __post_init__(self) -> None:
        for name in ("csv", "md", "png", "html"):
            check_output_file(getattr(self, name), f"--{name}")


def main(argv: Sequence[str]) -> int:
    """Rank the runs, print the table and write the files that the options name."""
    options = parse(CompareOptions, argv, prog="gptscale compare", about="Rank runs of the same work.")
    if not options.paths:
        raise ConfigError("no PATH is given", "in compare", "give a results folder, such as `gptscale compare results`")
    of_vision = [_is_of_vision(path) for path in options.paths]
    if any(of_vision):
        return _compare_vision(options, all(of_vision))
    from gptscale.results.comparison.groups import compare
    from gptscale.results.comparison.read import load
    from gptscale.results.comparison.write import write

    write(compare(load(options.paths)), csv=options.csv, md=options.md, png=options.png, html=options.html)
    return 0


def _is_of_vision(path: Path) -> bool:
    """Return whether a path names vision runs: a lenet.csv, or a folder that has one and no summary.csv."""
    return path.name == "lenet.csv" or ((path / "lenet.csv").is_file() and not (path / "summary.csv").exists())


def _compare_vision(options: CompareOptions, has_nothing_else: bool) -> int:
    """Compare the runs of lenet.csv files."""
    if not has_nothing_else:
        raise ConfigError("vision runs and GPT runs do not compare", "in compare", "give folders of one kind")
    if options.html:
        raise ConfigError("vision runs have no page", "in --html", "use --md and --png")
    lab = import_module(LAB)
    lab.write(lab.compare(lab.load(options.paths)), csv=options.csv, md=options.md, png=options.png)
    return 0
