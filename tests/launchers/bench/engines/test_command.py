"""`gptscale bench engines` on one process: the row and the table of an engine, and a recipe that has no minimal loop."""

import pandas as pd
import pytest

from gptscale.launchers.bench.engines.minimal_loops import SETUPS
from gptscale.launchers.cli import main
from gptscale.recipes import RECIPES


@pytest.mark.slow
def test_an_engine_beside_its_own_loop(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--recipes", "ddp", "--nproc", "1", "--rounds", "1", "--n-embd", "64", "--csv", str(tmp_path / "e.csv")]
    assert main(["bench", "engines", *words]) == 0
    (row,) = pd.read_csv(tmp_path / "e.csv").to_dict("records")
    assert (row["recipe"], row["nproc"]) == ("ddp", 1)
    assert row["ratio"] == row["ratio_p10"] == row["ratio_p90"]
    assert abs(row["ratio"] - row["our_step_s"] / row["bare_step_s"]) < 1e-9
    assert "its own loop ms" in capsys.readouterr().out


def test_only_recipes_with_a_minimal_loop_can_be_asked_for(capsys):
    assert set(SETUPS) <= set(RECIPES)
    assert main(["bench", "engines", "--recipes", "ddp,sinlge"]) == 2
    assert "sinlge has no minimal loop, in --recipes" in capsys.readouterr().err
