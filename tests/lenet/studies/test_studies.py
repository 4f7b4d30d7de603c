"""Tests of two studies: the command on a few steps of the embedded digits, and its table beside the report's."""

import pandas as pd
import pytest
import torch

from gptscale.lenet.comparison.rows import MeasuredRows
from gptscale.lenet.comparison.tables import Column, not_significant, overlaps, table
from gptscale.lenet.studies.strategies import StrategiesOptions, step_table
from gptscale.lenet.studies.study import StudyResult


@pytest.mark.slow
def test_strategies_compute_the_same(study, capsys):
    """One process, and Fabric on one and two, must have the same loss. Other files test DDP and the Trainer."""
    pytest.importorskip("lightning_fabric")
    rows = study("strategies", "--strategies", "single,fabric", "--batch-size", "16")
    assert rows.world_size.to_dict() == {"single x1": 1, "fabric x1": 1, "fabric x2": 2}
    assert rows.strategy.tolist() == ["single", "fabric", "fabric"]
    for column in ("loss_first", "loss_last"):
        assert ((rows[column] - rows[column]["single x1"]).abs() / rows[column]).max() <= 1e-5
    assert rows.test_accuracy.nunique() == 1
    said = capsys.readouterr().out
    assert "dataparallel was not run" in said
    for title in ("added to a plain step, ms", "epoch 1", "report B: DDP, 8 GPUs"):
        assert title in said


def test_only_strategies_that_fit_the_device_and_the_precision_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "dataparallel" in StrategiesOptions().names
    assert "dataparallel" not in StrategiesOptions(device="cpu").names
    assert not {"trainer", "trainer_bare"} & {*StrategiesOptions(precision="fp16").names}


def test_what_a_strategy_adds_is_taken_from_the_same_turn():
    """The machine's second turn was slow for both. Between turns the strategies cannot be compared."""
    runs = pd.DataFrame({"variant": ["single x1", "ddp x1"], "status": "ok"})
    steps = [("single x1", 1, 3.0), ("single x1", 2, 9.0), ("ddp x1", 1, 4.0), ("ddp x1", 2, 10.5), ("ddp x1", 3, 99.0)]
    times = pd.DataFrame(steps, columns=["variant", "seed", "median_ms"]).assign(p10_ms=1.0, p90_ms=12.0)
    result = StudyResult(StrategiesOptions(), MeasuredRows(runs, pd.DataFrame(), times, pd.DataFrame()))
    plain, ddp = step_table(result)
    assert plain["median step, ms"] == "6.00 (3.00-9.00)"
    assert plain["added to a plain step, ms"] == "-"
    assert ddp["added to a plain step, ms"] == "1.25 (1.00 to 1.50)"


@pytest.mark.slow
def test_workers(study):
    pytest.importorskip("torchvision")
    rows = study("workers", "--workers", "0,2")
    assert rows.index.tolist() == [
        "0 workers", "2 workers", "fast loader",
        "0 workers, not augmented", "2 workers, not augmented", "fast loader, not augmented",
    ]  # fmt: skip
    assert rows.num_workers.tolist() == [0, 2, 0, 0, 2, 0]
    assert (rows.load_s > 0).all()
    assert rows.load_s["fast loader"] < rows.load_s["0 workers"]


def test_what_is_significant():
    assert overlaps([1, 3], [2, 4])
    assert not overlaps([1, 2], [3, 4])
    groups = {name: pd.DataFrame({"x": x}) for name, x in {"a": [1.0, 3.0], "b": [2.0, 2.5], "c": [9.0, 8.0]}.items()}
    column = Column("x", "x", ".1f", spread=True)
    assert not_significant(groups, column) == ["x: a and b do not differ significantly, their spreads overlap"]
    assert table(groups, [column])[0] == {"run": "a", "x": "2.0 (1.0-3.0)"}
