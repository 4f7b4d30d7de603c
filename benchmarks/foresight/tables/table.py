"""Read a table of measured runs, whichever of the known kinds it is."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

from benchmarks.foresight.tables.collectives import ALL_REDUCES, BANDWIDTHS
from benchmarks.foresight.tables.composer import COMPOSER
from benchmarks.foresight.tables.megatron_lm import MEGATRON_LM
from benchmarks.foresight.tables.nanotron import NANOTRON
from benchmarks.foresight.tables.rows import CellsOfRow, MeasuredRun, Profile
from benchmarks.foresight.tables.vtrain import VTRAIN
from gptscale.common.errors import DataError
from gptscale.common.settings.user_file import read_text

PROFILES = (VTRAIN, NANOTRON, COMPOSER, MEGATRON_LM, ALL_REDUCES, BANDWIDTHS)

# The largest of the known tables has 200 kB.
FILE_BYTES_MAX = 2**26


class MeasuredTable(NamedTuple):
    """A table as it was read. titles: of its columns. cells: of its rows. runs: what each row says."""

    path: Path
    profile: Profile
    titles: list[str]
    cells: list[dict[str, str]]
    runs: list[MeasuredRun]


def read_table(path: Path) -> MeasuredTable:
    """Return the table in a CSV file. DataError for one that is no table of a known kind, or has no rows."""

    def refuse(reason: str) -> DataError:
        return DataError(f"{path} cannot be read ({reason})", "in the table", "give a CSV file of measured runs")

    try:
        reader = csv.DictReader(io.StringIO(read_text(path, FILE_BYTES_MAX, refuse), newline=""), restkey="")
        titles = list(reader.fieldnames or [])
        lines = [(reader.line_num, row) for row in reader]
    except csv.Error:
        raise refuse("it is no CSV file") from None
    profile = _profile_of(path, titles)
    if not lines:
        raise DataError(f"{path} has no rows", "in the table", "give one with measured runs")
    runs = [profile.read(CellsOfRow(row, f"in {path} line {line}")) for line, row in lines]
    return MeasuredTable(path, profile, titles, [{t: row.get(t) or "" for t in titles} for _, row in lines], runs)


def _profile_of(path: Path, titles: list[str]) -> Profile:
    """Return the first profile whose columns are all there."""
    for profile in PROFILES:
        if set(profile.columns) <= set(titles):
            return profile
    nearest = max(PROFILES, key=lambda p: len(set(p.columns) & set(titles)) / len(p.columns))
    missing = [title for title in nearest.columns if title not in titles]
    if len(missing) == len(nearest.columns):
        names = ", ".join(profile.name for profile in PROFILES)
        raise DataError(f"{path} has columns of no known table", "in the table", f"give one of: {names}")
    what = f"{path} has no column {', '.join(map(repr, missing))}"
    raise DataError(what, f"in a table like {nearest.name}'s", "add it to the file")
