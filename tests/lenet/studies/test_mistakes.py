"""The mistakes of a run are those of its newest checkpoint, counted, listed and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from gptscale.launchers.cli import main
from gptscale.lenet.run.columns import read_summary


@pytest.fixture
def run(tmp_path: Path) -> Path:
    pytest.importorskip("sklearn")
    words = ["--epochs", "2", "--save-every", "2", "--max-steps", "40", "--device", "cpu", "--seed", "1"]
    assert main(["lenet", "train", *words, "--out", str(tmp_path), "--run-name", "r"]) == 0
    return tmp_path / "runs" / "r"


def test_they_are_as_many_as_the_runs_accuracy_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: run.parent / f"m.{kind}" for kind in ("csv", "md", "png")}
    words = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert main(["lenet", "mistakes", "--run", str(run), "--device", "cpu", "--most", "23", *words]) == 0
    wrong = pd.read_csv(files["csv"])
    accuracy = read_summary(run.parents[1] / "lenet.csv").test_accuracy.iloc[0]
    assert len(wrong) == round(449 * (1 - accuracy)) > 23
    assert (wrong.label != wrong.answer).all()
    assert wrong.probability.is_monotonic_decreasing
    assert wrong.image.is_unique
    written = files["md"].read_text()
    pair, n = next(iter(wrong.value_counts(["label", "answer"]).items()))
    assert f"| {pair[0]} taken for {pair[1]} | {n} |" in written
    assert f"{len(wrong)} of 449 test images wrong" in capsys.readouterr().out
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_what_it_cannot_show(run: Path, idx_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: object) -> str:
        assert main(["lenet", "mistakes", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "no run is given, in --run" in said()
    assert "is no run of gptscale lenet, in --run" in said("--run", run.parent)
    assert "are other images than the run's, in --data" in said("--run", run, "--data", idx_folder)
    record = json.loads((run / "run.json").read_text())
    (run.parent / "bare").mkdir()
    (run.parent / "bare" / "run.json").write_text(json.dumps(record))
    assert "has no checkpoint, in --run, train with --save-every 1" in said("--run", run.parent / "bare")
