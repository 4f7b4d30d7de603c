"""Panels of a study's figure: what is drawn is the median of the repeats, with their spread."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from gptscale.lenet.comparison.figures import bars, classes, curves, grid
from gptscale.lenet.comparison.tables import Column


def drawn(panel: Any) -> dict[str, list[float]]:
    """Return the heights of the named lines of a panel."""
    return {line.get_label(): list(line.get_ydata()) for line in panel.lines if not line.get_label().startswith("_")}


def test_the_median_and_the_spread_are_drawn() -> None:
    panel = Figure().subplots()
    bars(
        panel, {"a": [3.0, 1.0, 2.0], "failed": [None], "b": [5.0]}, [Column("seconds", lambda row: row, ".1f")], "time"
    )
    assert [bar.get_width() for bar in panel.patches] == [2.0, 5.0]  # type: ignore[attr-defined]
    assert [list(line.get_xdata()) for line in panel.lines] == [[1.0, 3.0], [5.0, 5.0]]  # type: ignore[arg-type]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "failed", "b"]


def test_curves_are_medians_over_the_runs_and_the_reports_as_far_as_ours() -> None:
    runs = [pd.DataFrame({"epoch": [1, 2], "test_accuracy": a}) for a in ([0.1, 0.4], [0.3, 0.8], [0.2, 0.6])]
    panel = Figure().subplots()
    curves(panel, {"ddp": runs}, "test_accuracy", "accuracy", 100, [{"name": "report", "losses": (9, 8, 7)}])
    assert drawn(panel) == {"ddp": [20.0, 60.0], "report": [9, 8]}
    # Each run is a thin line besides.
    assert len(panel.lines) == 3 + 2


def test_a_run_that_ended_early_is_in_the_medians_of_its_epochs() -> None:
    runs = [pd.DataFrame({"epoch": range(1, n + 1), "train_loss": [float(n)] * n}) for n in (3, 2)]
    panel = Figure().subplots()
    curves(panel, {"a": runs}, "train_loss", "loss")
    assert drawn(panel) == {"a": [2.5, 2.5, 3.0]}


def test_classes_stand_beside_the_reports() -> None:
    panel = Figure().subplots()
    classes(panel, {"ddp": [{"class_accuracy": "0.5 0.75"}]}, [{"name": "report", "by_class": (99.0, 98.0)}])
    assert drawn(panel) == {"ddp": [50.0, 75.0], "report": [99.0, 98.0]}


def test_rows_of_panels_may_differ_in_number() -> None:
    figure, rows = grid([2, 3], [4.0, 2.0], 10.0, "title")
    assert [len(row) for row in rows] == [2, 3]
    assert tuple(figure.get_size_inches()) == (10.0, 6.0)
