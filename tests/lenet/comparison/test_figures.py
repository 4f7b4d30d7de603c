"""Panels of a study's figure: what is drawn is the median of the repeats, with their spread."""

import math

import pandas as pd
from matplotlib.figure import Figure

from gptscale.lenet.comparison.figures import bars, curves
from gptscale.lenet.comparison.tables import BUSY, Column, first_of, of, table, with_references


def drawn(panel):
    """Return the heights of the named lines of a panel."""
    return {line.get_label(): list(line.get_ydata()) for line in panel.lines if not line.get_label().startswith("_")}


def test_the_median_and_the_spread_are_drawn():
    panel = Figure().subplots()
    bars(panel, {"a": [3.0, 1.0, 2.0], "none": [None], "b": [5.0]}, [Column("seconds", lambda row: row, ".1f")], "time")
    assert [bar.get_width() for bar in panel.patches] == [2.0, 5.0]
    assert [list(line.get_xdata()) for line in panel.lines] == [[1.0, 3.0], [5.0, 5.0]]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "none", "b"]


def test_curves_are_medians_over_the_runs_and_the_reports_as_far_as_ours():
    runs = [pd.DataFrame({"epoch": [1, 2], "test_accuracy": a}) for a in ([0.1, 0.4], [0.3, 0.8], [0.2, 0.6])]
    panel = Figure().subplots()
    curves(panel, {"ddp": runs}, "test_accuracy", "accuracy", 100, [{"name": "report", "losses": (9, 8, 7)}])
    assert drawn(panel) == {"ddp": [20.0, 60.0], "report": [9, 8]}
    # Each run is a thin line besides.
    assert len(panel.lines) == 3 + 2


def test_empty_cells_are_no_figures():
    row = {"a": math.nan, "b": 2.0}
    assert of("a")(row) is None
    assert of("b", 100)(row) == 200.0
    assert first_of("a", "b")(row) == 2.0
    assert first_of("a")(row) is None
    assert table({"x": [row]}, [Column("A", of("a"), ".1f")]) == [{"run": "x", "A": "-"}]
    assert BUSY.value({"gpu_util_percent": math.nan, "cpu_util_percent": 95.0}) == 95.0


def test_references_stand_below_with_nothing_invented():
    lines = with_references([{"run": "ours", "s": "1.0", "%": "99"}], [{"run": "report", "s": "7.0"}])
    assert lines == [{"run": "ours", "s": "1.0", "%": "99"}, {"run": "report", "s": "7.0", "%": "-"}]
