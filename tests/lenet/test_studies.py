"""Studies: the whole command on a few steps of the embedded digits, its table beside the text's, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from gptscale.launchers.cli import main
from gptscale.lenet import study as study_module
from gptscale.lenet.config import VisionConfig
from gptscale.lenet.plan import world_from_environment
from gptscale.lenet.study import Cell, Column, not_significant, of, overlaps, table
from gptscale.lenet.train import train


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def _alone_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that need no second process share this one: starting Python costs more than the few steps."""
    launched = study_module._run

    def run(config: VisionConfig, cell: Cell) -> None:
        if cell.nproc > 1 or config.strategy in ("ddp", "fabric"):
            launched(config, cell)
        else:
            assert train(config, world_from_environment(config), quiet=True).exit_status == 0

    monkeypatch.setattr(study_module, "_run", run)


def study(name: str, folder: Path, *words: str) -> pd.DataFrame:
    """Run a study for a few steps; its rows by variant, after checking the files."""
    files = {kind: folder / f"s.{kind}" for kind in ("csv", "md", "png")}
    given = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    common = ["--repeats", "1", "--epochs", "1", "--max-steps", "6", "--out", str(folder / "out"), "--device", "cpu"]
    assert main(["lenet", name, *common, *given, *words]) == 0
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert "text " in files["md"].read_text()
    rows = pd.read_csv(files["csv"])
    assert (rows.study == name).all()
    assert (rows.status == "ok").all()
    assert (rows.n_test == 449).all()
    return rows.set_index("variant")


def test_strategies_compute_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process, and Fabric on one and two: one loss, as parity has it (test_training.py has DDP)."""
    pytest.importorskip("lightning_fabric")
    rows = study("strategies", tmp_path, "--strategies", "single,fabric", "--batch-size", "16")
    assert rows.world_size.to_dict() == {"single x1": 1, "fabric x1": 1, "fabric x2": 2}
    assert rows.strategy.tolist() == ["single", "fabric", "fabric"]
    for column in ("loss_first", "loss_last"):
        assert ((rows[column] - rows[column]["single x1"]).abs() / rows[column]).max() <= 1e-5
    assert rows.test_accuracy.nunique() == 1
    assert "dataparallel was not run" in capsys.readouterr().out


def test_workers(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    rows = study("workers", tmp_path, "--workers", "0,2")
    assert rows.index.tolist() == [
        "0 workers", "2 workers", "fast loader",
        "0 workers, not augmented", "2 workers, not augmented", "fast loader, not augmented",
    ]  # fmt: skip
    assert rows.num_workers.tolist() == [0, 2, 0, 0, 2, 0]
    assert (rows.load_s > 0).all()
    assert rows.load_s["fast loader"] < rows.load_s["0 workers"]


def test_what_is_significant() -> None:
    assert overlaps([1, 3], [2, 4])
    assert not overlaps([1, 2], [3, 4])
    groups = {"a": [{"x": 1.0}, {"x": 3.0}], "b": [{"x": 2.0}, {"x": 2.5}], "c": [{"x": 9.0}, {"x": 8.0}]}
    column = Column("x", of("x"), ".1f", spread=True)
    assert not_significant(groups, column) == ["x: a and b do not differ significantly, their spreads overlap"]
    assert table(groups, [column])[0] == {"run": "a", "x": "2.0 (1.0-3.0)"}
