"""Tests of `gptscale lenet baseline`: what it writes, and that the embedded digits are learned."""

import pandas as pd
import pytest

from gptscale.launchers.cli import main
from gptscale.lenet.run.columns import LENET
from gptscale.lenet.run.config import VisionConfig
from gptscale.lenet.studies.baseline import PRESETS


@pytest.mark.slow
def test_the_digits_are_learned_to_98_5_percent(tmp_path):
    """Run the command as a user types it, for one seed, and check accuracy, rows, table and figure."""
    pytest.importorskip("sklearn")
    files = {name: tmp_path / f"b.{name}" for name in ("csv", "md", "png")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert main(["lenet", "baseline", "--seeds", "1", "--out", str(tmp_path / "out"), "--device", "cpu", *words]) == 0
    rows = pd.read_csv(files["csv"])
    assert list(rows) == LENET.names
    assert rows.test_accuracy[0] >= 0.985
    assert (rows.study[0], rows.variant[0], rows.n_test[0]) == ("baseline", "digits", 449)
    assert "scikit-learn's handwritten digits" in rows.data[0]
    written = files["md"].read_text()
    for word in ("| digits | 30 | 32 |", "exercise: must exceed", "report B: RandomAffine", "99.19", "epoch 30"):
        assert word in written
    assert len(pd.read_csv(tmp_path / "b-epochs.csv")) == 30
    # The same tables again, from the files.
    again = ["--rows", str(files["csv"]), "--md", str(tmp_path / "again.md"), "--png", str(tmp_path / "again.png")]
    assert main(["lenet", "baseline", *again]) == 0
    assert (tmp_path / "again.md").read_text() == written
    assert files["png"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    assert VisionConfig(**PRESETS[name]).epochs >= 3
