"""Mean losses of each 200 batches, as report A gave them (docs/lenet/README.md)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gptscale.lenet.comparison.reports import RUNS
from gptscale.lenet.comparison.tables import Lines

BATCHES = 200
WINDOW_COLUMNS = "epoch window loss".split()


def window_losses(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss of each 200 batches of a run, by epoch, as its `steps` have it.

    The last batches of an epoch, fewer than 200, are in no mean, as in report A.
    """
    window = steps.groupby("epoch").cumcount() // BATCHES
    means = steps.groupby(["epoch", window.rename("window")]).loss.agg(["mean", "size"])
    return means.loc[means["size"] == BATCHES, "mean"].rename("loss").reset_index()


def losses_by_window(windows: pd.DataFrame, variants: Sequence[str]) -> list[Lines]:
    """Return a table for each variant that has them: an epoch per line, the median over runs, and that of report A."""
    tables = []
    for variant in variants:
        rows = windows[windows.variant == variant]
        medians = rows.pivot_table(index="epoch", columns="window", values="loss", aggfunc="median")
        lines = []
        for (epoch, losses), report in zip(medians.iterrows(), RUNS["adam"]["losses"], strict=False):
            line = {f"epoch of {variant}": str(epoch)}
            line |= {f"to batch {BATCHES * (i + 1)}": f"{loss:.3f}" for i, loss in enumerate(losses)}
            lines.append(line | {f"report A: {BATCHES * (i + 1)}": f"{loss:.3f}" for i, loss in enumerate(report)})
        tables.append(lines)
    return [lines for lines in tables if lines]
