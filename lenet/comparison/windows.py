"""Mean losses of each 200 batches, as report A gave them (docs/lenet/README.md)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gptscale.lenet.comparison.reference_figures import LENET_WITH_ADAM
from gptscale.lenet.comparison.rows import beside

BATCHES = 200


def window_losses(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the mean loss of each 200 batches of a run, by epoch, as its `steps` have it.

    The last batches of an epoch, fewer than 200, are in no mean, as in report A.
    """
    window = steps.groupby("epoch").cumcount() // BATCHES
    means = steps.groupby(["epoch", window.rename("window")]).loss.agg(["mean", "size"])
    return means.loc[means["size"] == BATCHES, "mean"].rename("loss").reset_index()


def losses_by_window(windows: pd.DataFrame) -> list[dict[str, str]]:
    """Return the mean loss of each 200 batches, an epoch per line: the median over runs, and that of report A."""
    medians = windows.pivot_table(index="epoch", columns="window", values="loss", aggfunc="median")
    lines = []
    for (epoch, losses), report in zip(medians.iterrows(), LENET_WITH_ADAM["losses"], strict=False):
        line = {"epoch": str(epoch)} | {f"to batch {BATCHES * (i + 1)}": f"{loss:.3f}" for i, loss in enumerate(losses)}
        lines.append(line | {f"report A: {BATCHES * (i + 1)}": f"{loss:.3f}" for i, loss in enumerate(report)})
    return lines


def earlier_windows(files: str) -> pd.DataFrame:
    """Return the mean losses of each 200 batches that were written beside CSVs, which `files` names, or an empty table."""
    paths = [beside(Path(file), "windows") for file in files.split(",")]
    return pd.concat([pd.DataFrame(), *(pd.read_csv(path) for path in paths if path.is_file())], ignore_index=True)
