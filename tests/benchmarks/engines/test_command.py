"""The bench of engines on one process: the row and the table of one."""

import pandas as pd
import pytest

from benchmarks.engines.__main__ import main
from benchmarks.engines.minimal_splits import LIBRARY_SETUPS, SETUPS
from gptscale.launchers.cli import start
from gptscale.recipes import RECIPES


@pytest.mark.slow
def test_an_engine_beside_its_own_loop(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--recipes", "ddp", "--nproc", "1", "--rounds", "1", "--n-embd", "64", "--csv", str(tmp_path / "e.csv")]
    assert start(main, [*words]) == 0
    (row,) = pd.read_csv(tmp_path / "e.csv").to_dict("records")
    assert (row["recipe"], row["nproc"]) == ("ddp", 1)
    assert row["ratio"] == row["ratio_p10"] == row["ratio_p90"]
    assert abs(row["ratio"] - row["our_step_s"] / row["bare_step_s"]) < 1e-9
    assert "its own loop ms" in capsys.readouterr().out


def test_each_minimal_loop_is_that_of_a_recipe():
    assert {*SETUPS, *LIBRARY_SETUPS} <= set(RECIPES)
