"""Bars of a study: one for each variant, as long as the median of its repeats, with a line over their spread."""

from __future__ import annotations

from matplotlib.figure import Figure

from gptscale.lenet.studies.bars import bars
from gptscale.lenet.studies.study import Column


def test_the_median_and_the_spread_are_drawn() -> None:
    panel = Figure().subplots()
    bars(
        panel, {"a": [3.0, 1.0, 2.0], "failed": [None], "b": [5.0]}, [Column("seconds", lambda row: row, ".1f")], "time"
    )
    assert [bar.get_width() for bar in panel.patches] == [2.0, 5.0]  # type: ignore[attr-defined]
    assert [list(line.get_xdata()) for line in panel.lines] == [[1.0, 3.0], [5.0, 5.0]]  # type: ignore[arg-type]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["a", "failed", "b"]
