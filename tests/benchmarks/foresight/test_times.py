"""`python -m benchmarks.foresight.times` with one recipe, and recipes and shapes that cannot be compared."""

import pandas as pd
import pytest
from worlds import ok

from benchmarks.foresight.times.__main__ import main, measured_before
from gptscale.common.errors import DataError
from gptscale.launchers.cli import start

MODULE = "benchmarks.foresight.times"


@pytest.mark.slow
def test_a_recipe_is_predicted_and_measured(tmp_path):
    csv = tmp_path / "plan.csv"
    out = ok("--recipes", "ddp", "--shapes", "wide", "--rounds", 5, "--allow-busy", "--csv", csv, module=MODULE).stdout
    (row,) = pd.read_csv(csv).to_dict("records")
    assert (row["recipe"], row["shape"], row["ranks"], row["grade"]) == ("ddp", "wide", 2, "calibrated here")
    assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    assert "recommended ddp, best measured ddp, 0.0% slower" in out
    again = ok("--recipes", "ddp", "--shapes", "wide", "--rounds", 5, "--allow-busy", "--csv", csv, module=MODULE)
    assert "wide: ddp" not in again.stderr
    assert pd.read_csv(csv).to_dict("records") == [row]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="has no rows of this bench"):
        measured_before(tmp_path / "other.csv")
    assert measured_before(tmp_path / "none.csv") == {}


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--recipes", "dpp"], "unknown recipe 'dpp'"),
        (["--recipes", "colossal_tensor"], "colossal_tensor cannot be compared here: it runs in another environment"),
        (["--shapes", "narow"], "unknown shape 'narow', in --shapes"),
    ],
)
def test_bad_input_is_one_line(words, what, capsys):
    assert start(main, words) == 2
    assert what in capsys.readouterr().err
