"""`gptscale compare`: rank runs of the same work, and write the table to files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import tyro

from gptscale.common.errors import ConfigError
from gptscale.common.settings.checks import check_output_file
from gptscale.common.settings.command_line import parse
from gptscale.results.render import PICTURES

# The lab that compares vision runs. It is found by its name, because nothing here depends on it.
LAB = "gptscale.lenet.studies.compare"
KINDS = ("csv", "md", "tex", *PICTURES, "html")


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
    tex: Path | None = None
    """The table as LaTeX, for the package booktabs."""
    png: Path | None = None
    """Loss curves, speed, memory and what the time goes to, as a picture."""
    svg: Path | None = None
    """The same as SVG."""
    pdf: Path | None = None
    """The same as PDF."""
    panel: Literal["loss", "deviation", "speed", "memory", "time"] | None = None
    """The only panel of the pictures. By default all are there."""
    html: Path | None = None
    """One self-contained page with all of it."""

    def __post_init__(self) -> None:
        for kind, file in self.files().items():
            check_output_file(file, f"--{kind}")
            if file.suffix not in ("", f".{kind}") and kind in PICTURES:
                what = f"{file} does not end in .{kind}"
                raise ConfigError(what, f"in --{kind}", f"write {file.with_suffix(f'.{kind}')}")
        if self.panel and self.files().keys().isdisjoint(PICTURES):
            raise ConfigError("there is no picture to show it", "in --panel", "give --png, --svg or --pdf FILE too")

    def files(self) -> dict[str, Path]:
        named = {kind: getattr(self, kind) for kind in KINDS}
        return {kind: file for kind, file in named.items() if file is not None}


def main(argv: Sequence[str]) -> int:
    """Rank the runs, print the table and write the files that the options name."""
    options = parse(CompareOptions, argv, prog="gptscale compare", about="Rank runs of the same work.")
    if not options.paths:
        raise ConfigError("no PATH is given", "in compare", "give a results folder, such as `gptscale compare results`")
    with _reading():
        of_vision = [_is_of_vision(path) for path in options.paths]
    if any(of_vision):
        return _compare_vision(options, all(of_vision))
    from gptscale.results.comparison.groups import compare
    from gptscale.results.comparison.read import load
    from gptscale.results.comparison.write import write

    with _reading():
        rows = load(options.paths)
    write(compare(rows), options.files(), options.panel)
    return 0


@contextmanager
def _reading() -> Iterator[None]:
    """Refuse in one line a file that the system cannot read."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or 'a file'} cannot be read ({error.strerror})"
        raise ConfigError(what, "in compare", "give a results folder or a summary.csv") from None


def _is_of_vision(path: Path) -> bool:
    """Return whether a file has rows with an accuracy, or a folder has lenet.csv and no summary.csv."""
    if not path.is_file():
        return (path / "lenet.csv").is_file() and not (path / "summary.csv").exists()
    with path.open("rb") as file:
        return b",test_accuracy," in file.read(4096)


def _compare_vision(options: CompareOptions, has_nothing_else: bool) -> int:
    if not has_nothing_else:
        raise ConfigError("vision runs and GPT runs do not compare", "in compare", "give folders of one kind")
    if unwanted := sorted(options.files().keys() - {"csv", "md", "png"}):
        raise ConfigError("vision runs are not written so", f"in --{unwanted[0]}", "use --csv, --md and --png")
    if options.panel:
        raise ConfigError("vision runs have one picture of all", "in --panel", "leave it out")
    lab = import_module(LAB)
    with _reading():
        runs = lab.load(options.paths)
    lab.write(lab.compare(runs), csv=options.csv, md=options.md, png=options.png)
    return 0
