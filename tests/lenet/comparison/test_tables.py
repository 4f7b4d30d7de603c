"""Tables of vision runs: medians over repeats by class and by epoch, with the reports' figures below."""

from __future__ import annotations

import math

import pandas as pd

from gptscale.lenet.comparison.tables import (
    BUSY,
    Column,
    accuracy_table,
    class_table,
    first_of,
    loss_table,
    of,
    table,
    with_references,
)


def epochs(losses: list[float], accuracies: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {"epoch": range(1, len(losses) + 1), "train_loss": losses, "test_accuracy": accuracies}, dtype=float
    )


def test_empty_cells_are_no_figures() -> None:
    row = {"a": math.nan, "b": 2.0}
    assert of("a")(row) is None
    assert of("b", 100)(row) == 200.0
    assert first_of("a", "b")(row) == 2.0
    assert first_of("a")(row) is None
    assert table({"x": [row]}, [Column("A", of("a"), ".1f")]) == [{"run": "x", "A": "-"}]
    assert BUSY.value({"gpu_util_percent": math.nan, "cpu_util_percent": 95.0}) == 95.0


def test_references_stand_below_with_nothing_invented() -> None:
    lines = with_references([{"run": "ours", "s": "1.0", "%": "99"}], [{"run": "report", "s": "7.0"}])
    assert lines == [{"run": "ours", "s": "1.0", "%": "99"}, {"run": "report", "s": "7.0", "%": "-"}]


def test_classes_are_medians_over_repeats() -> None:
    groups = {
        "ddp": [{"class_accuracy": "0.9 - 0.5"}, {"class_accuracy": "0.8 - 0.7"}, {"class_accuracy": "1.0 - 0.6"}]
    }
    report = {"name": "report", "by_class": (99.5, 98.0, 97.25)}
    assert class_table(groups, [report]) == [
        {"run": "ddp", "0": "90.00", "2": "60.00"},
        {"run": "report", "0": "99.50", "1": "98.00", "2": "97.25"},
    ]


def test_losses_are_medians_and_the_report_is_cut_to_our_epochs() -> None:
    runs = [epochs([1.0, 0.5], [0.5, 0.6]), epochs([3.0, 0.7], [0.7, 0.8]), epochs([2.0, 0.6], [0.6, 0.7])]
    report = {"name": "report", "losses": (0.9, 0.8, 0.7)}
    assert loss_table({"a": runs}, [report]) == [
        {"run": "a", "epoch 1": "2.0000", "epoch 2": "0.6000"},
        {"run": "report", "epoch 1": "0.9000", "epoch 2": "0.8000"},
    ]
    assert loss_table({}, [report]) == []


def test_accuracy_is_shown_at_epochs_evenly_apart() -> None:
    runs = [epochs([1.0] * 8, [n / 10 for n in range(8)]), epochs([1.0] * 8, [n / 10 + 0.1 for n in range(8)])]
    (line,) = accuracy_table({"a": runs})
    assert list(line) == ["run", *(f"accuracy % after epoch {n}" for n in (2, 4, 6, 8))]
    assert line["accuracy % after epoch 8"] == "75.00 (70.00-80.00)"
    assert accuracy_table({}) == []
