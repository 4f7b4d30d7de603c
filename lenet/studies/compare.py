"""`gptscale compare` for vision runs: rank those of the same work by accuracy, and draw their epochs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gptscale.common.errors import ConfigError, visible
from gptscale.lenet.comparison import figures
from gptscale.lenet.comparison.tables import ACCURACY, PEAK_MEMORY, Column, Groups, finish, overlaps, table, values_of
from gptscale.lenet.run.columns import CONFIGURATION, LENET, WORK, read_summary
from gptscale.results.comparison.run_files import DamagedFileError, run_file
from gptscale.results.render import DPI

if TYPE_CHECKING:
    import pandas as pd

SPEED = Column("images/s", "images_per_s", ",.0f", spread=True)
COLUMNS = (
    ACCURACY,
    Column("best %", "best_test_accuracy", ".2f", 100),
    Column("99 % after s", "seconds_to_99", ".1f"),
    Column("last loss", "loss_last", ".4f"),
    SPEED,
    Column("training s", "train_time_s", ".1f"),
    PEAK_MEMORY,
)
EPOCHS_BYTES_MAX = 2**24


class VisionComparison(NamedTuple):
    """Repeats of the same work by their name, best accuracy first, and notes on all other rows."""

    ranked: Groups
    notes: list[str]


def load(paths: Sequence[Path]) -> pd.DataFrame:
    """Read the rows of results folders or of lenet.csv files, the last one of each run."""
    import pandas as pd

    frames = []
    for path in paths:
        file = path / LENET.file if path.is_dir() else path
        frames.append(read_summary(file).assign(folder=str(file.parent)))
    rows = pd.concat(frames, ignore_index=True)
    if rows.empty:
        raise ConfigError("there are no rows", "in compare", "run `gptscale lenet train` first")
    return rows.drop_duplicates(["folder", "run_id"], keep="last")


def compare(rows: pd.DataFrame) -> VisionComparison:
    """Group the repeats of the work that most runs did. Of equals the newest is taken."""
    ended = rows[rows.status == "ok"]
    failed = rows[rows.status != "ok"].itertuples()
    notes = [visible(f"{row.run_id}: {row.status}, {row.error}")[:200] for row in failed]
    if ended.empty:
        return VisionComparison({}, notes)
    works = ended.groupby(WORK, dropna=False).agg(runs=("run_id", "size"), newest=("timestamp", "max"))
    work = works.sort_values(["runs", "newest"]).index[-1]
    groups = []
    for cells, members in ended.groupby(WORK, dropna=False, sort=False):
        if cells == work:
            groups = [group for _, group in members.groupby(CONFIGURATION, dropna=False, sort=False)]
        else:
            differing = [f"{name} {a} (ranked: {b})" for name, a, b in zip(WORK, cells, work, strict=True) if a != b]
            notes.append(visible(f"other work, not ranked (runs: {len(members)}): {', '.join(differing)}"))
    groups.sort(key=lambda group: -group.test_accuracy.median())
    ranked = dict(zip(_names(groups), groups, strict=True))
    return VisionComparison(ranked, notes + _ties(ranked, ACCURACY) + _ties(ranked, SPEED))


def _names(groups: Sequence[pd.DataFrame]) -> list[str]:
    """Name each group by the model and by what it does not share with the others."""
    differing = [name for name in CONFIGURATION if len({str(group[name].iloc[0]) for group in groups}) > 1]
    names = []
    for group in groups:
        row = group.iloc[0].replace("", "none")
        names.append(visible(" ".join([str(row.model), *(f"{name}={row[name]}" for name in differing)])))
    return names


def _ties(groups: Groups, column: Column) -> list[str]:
    """Return a sentence for neighbours in the ranking whose spreads overlap."""
    values = [(name, repeats) for name, repeats in values_of(groups, column).items() if len(repeats) > 1]
    return [f"{column.title}: {a} and {b} are not told apart" for (a, x), (b, y) in pairwise(values) if overlaps(x, y)]


def draw(comparison: VisionComparison, path: Path) -> None:
    """Write the curves of loss and accuracy over the epochs, and bars of accuracy and speed."""
    import pandas as pd

    groups = comparison.ranked
    first = next(iter(groups.values())).iloc[0]
    title = f"{first.model} on {first.data}: {first.n_train:,} images, {first.epochs} epochs, batch {first.batch_size}"
    curved = {}
    for name, group in groups.items():
        runs = [read_epochs(row.folder, row.run_id) for _, row in group.iterrows()]
        if long := [run for run in runs if run is not None and len(run) > 1]:
            curved[name] = pd.concat(long)
    heights = [3.4] * bool(curved) + [max(3.4, 0.45 * len(groups))]
    figure, rows = figures.grid([2] * len(heights), heights, 13.0, title.replace("$", r"\$"))
    if curved:
        figures.curves(rows[0][0], curved, "train_loss", "training loss")
        figures.curves(rows[0][1], curved, "test_accuracy", "test accuracy (%)", 100)
    figures.bars(rows[-1][0], groups, [ACCURACY], "test accuracy (%), line: spread over repeats")
    figures.bars(rows[-1][1], groups, [SPEED], "images/s, line: spread over repeats")
    figure.savefig(path, dpi=DPI)


def read_epochs(folder: str, run_id: str) -> pd.DataFrame | None:
    """Return a run's epochs, or None if its folder is gone or the file is no table of epochs."""
    import pandas as pd

    try:
        with run_file(folder, run_id, "epochs.csv") as file:
            text = file.read(EPOCHS_BYTES_MAX)
        epochs = pd.read_csv(io.BytesIO(text[: text.rfind(b"\n") + 1]))
        numbers: pd.DataFrame = epochs[["epoch", "train_loss", "test_accuracy"]].apply(pd.to_numeric, errors="coerce")
        return numbers.assign(run_id=f"{folder}/{run_id}")
    except (DamagedFileError, OSError, ValueError, KeyError):
        return None


def write(comparison: VisionComparison, *, csv: Path | None, md: Path | None, png: Path | None) -> None:
    """Print the table with its notes, and write the files that are named."""
    import pandas as pd

    lines = table(comparison.ranked, COLUMNS)
    lines = [{"run": line["run"], "runs": str(len(comparison.ranked[line["run"]]))} | line for line in lines]
    if not lines:
        raise ConfigError("no run ended well", "in compare", f"see {'; '.join(comparison.notes)[:300]}")
    if csv:
        pd.concat(comparison.ranked.values()).to_csv(csv, index=False)
    finish([lines], comparison.notes, md, png, partial(draw, comparison), [csv])
