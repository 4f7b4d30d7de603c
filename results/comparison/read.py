"""Read the rows of all summaries that are compared, with what the folders of their runs say."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gptscale.common.errors import ConfigError
from gptscale.results.comparison.rows import SummaryRows
from gptscale.results.comparison.run_files import read_run_json, whole_lines
from gptscale.results.comparison.summary_file import Summary, cells_of

if TYPE_CHECKING:
    import pandas as pd

# Lines read at once.
BLOCK_LINES = 2**14


def load(paths: Sequence[Path]) -> pd.DataFrame:
    """Read all rows of results folders, summary files or single runs' folders.

    A run that was resumed, or repeated under its name, has several rows. Only the last counts. A row that is damaged has the
    status `damaged`. The column `folder` is the results folder that the run is in, `has_files` whether the run's own folder is
    still there, `damage` what of it cannot be read.
    """
    import numpy as np
    import pandas as pd

    rows = SummaryRows()
    for path in paths:
        _read(path, rows)
    if not len(rows):
        raise ConfigError("there are no rows", "in compare", "run `gptscale sweep` first")
    frame = rows.frame()
    folders, run_ids = np.asarray(frame.folder, dtype=object), frame.run_id.to_numpy()
    # Most rows of a large summary have no folder any more.
    names = {folder: _names_in(Path(folder) / "runs") for folder in frame.folder.cat.categories}
    has_files = np.array([run_id in names[folder] for folder, run_id in zip(folders, run_ids, strict=True)])
    options, damage = (np.full(len(frame), "", dtype=object) for _ in range(2))
    works = np.asarray(frame.workload_hash, dtype=object)
    for i in np.flatnonzero(has_files):
        start = read_run_json(folders[i], run_ids[i])
        options[i], damage[i] = start.recipe_options, start.damage
        # An older version hashed less of the work than this one.
        works[i] = start.workload_hash or works[i]
    for name, texts in (("recipe_options", options), ("damage", damage), ("workload_hash", works)):
        codes, categories = pd.factorize(texts)
        frame[name] = pd.Categorical.from_codes(codes, pd.Index(categories, dtype=object))
    frame["has_files"] = has_files
    return frame


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _read(path: Path, rows: SummaryRows) -> None:
    is_run = path.absolute().parent.name == "runs"
    home = path.absolute().parent.parent if is_run else path
    file = home / "summary.csv" if home.is_dir() else home
    if not file.is_file():
        raise ConfigError(f"{path} holds no summary.csv", "in compare", "give a results folder or a summary.csv")
    with file.open("rb") as content:
        lines = whole_lines(content)
        summary = Summary(file, cells_of(next(lines, b"")))
        numbered: Iterator[tuple[int, bytes]] = enumerate(lines, start=2)
        if is_run:
            numbered = (line for line in numbered if summary.run_id(cells_of(line[1])) == path.name)
        while block := list(itertools.islice(numbered, BLOCK_LINES)):
            rows.add(summary.columns_of(block))
        rows.add(summary.columns_of_rest())
