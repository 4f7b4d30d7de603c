"""Panels of a study's figure: what is drawn is the median of the repeats, with their spread."""

import math

import pandas as pd
from matplotlib.figure import Figure

from gptscale.lenet.comparison.figures import bars, curves
from gptscale.lenet.comparison.tables import BUSY, Column, table, with_references


def drawn(panel):
    """Return the heights of the named lines of a panel."""
    return {line.get_label(): list(line.get_ydata()) for line in panel.lines if not line.get_label().startswith("_")}


def test_the_median_and_the_spread_are_drawn():
    panel = Figure().subplots()
    groups = {
        name: pd.DataFrame({"s": values}) for name, values in {"a": [3.0, 1.0, 2.0], "none": [], "b": [5.0]}.items()
    }
    bars(panel, groups, [Column("seconds", "s", ".1f")], "time")
    assert [bar.get_width() for bar in panel.patches] == [2.0, 5.0]
    assert [list(line.get_xdata()) for line in panel.lines] == [[1.0, 3.0], [5.0, 5.0]]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "none", "b"]


def test_curves_are_medians_over_the_runs_and_the_reports_as_far_as_ours():
    rows = [(run, epoch, run * epoch / 10) for run in (1, 3, 2) for epoch in (1, 2)]
    epochs = pd.DataFrame(rows, columns=["run_id", "epoch", "test_accuracy"])
    panel = Figure().subplots()
    curves(panel, {"ddp": epochs}, "test_accuracy", "accuracy", 100, [{"name": "report", "losses": (9, 8, 7)}])
    assert drawn(panel) == {"ddp": [20.0, 40.0], "report": [9, 8]}
    # Each run is a thin line besides.
    assert len(panel.lines) == 3 + 2


def test_empty_cells_are_no_figures():
    rows = pd.DataFrame({"a": [math.nan, math.nan], "b": [2.0, 3.0], "gpu_util_percent": [math.nan, 40.0]})
    columns = [Column("A", "a", ".1f"), Column("B", "b", ".1f", 100), Column("first", "a b", ".1f", spread=True)]
    assert table({"x": rows}, columns) == [{"run": "x", "A": "-", "B": "250.0", "first": "2.5 (2.0-3.0)"}]
    assert BUSY.values(rows.assign(cpu_util_percent=95.0)) == [95.0, 40.0]


def test_references_stand_below_with_nothing_invented():
    lines = with_references([{"run": "ours", "s": "1.0", "%": "99"}], [{"run": "report", "s": "7.0"}])
    assert lines == [{"run": "ours", "s": "1.0", "%": "99"}, {"run": "report", "s": "7.0", "%": "-"}]
