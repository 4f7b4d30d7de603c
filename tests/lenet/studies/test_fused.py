"""Nets with the fused operator of `gptscale lenet fused` train as those with PyTorch's do."""

import pandas as pd
import pytest

from gptscale.launchers.cli import main

pytest.importorskip("sklearn")


def test_what_has_no_rows_of_nets_is_refused(tmp_path, capsys):
    (tmp_path / "other.csv").write_text("net,way\nconv2_shared,CPU\n")
    for name in ("none.csv", "other.csv"):
        words = ["--rows", str(tmp_path / name), "--png", str(tmp_path / "f.png")]
        assert main(["lenet", "fused", *words]) == 2
        assert f"{name} has no rows of a study" in capsys.readouterr().err


@pytest.mark.slow
def test_fused_nets_train_alike(tmp_path, capsys):
    files = [word for kind in ("csv", "md", "png") for word in (f"--{kind}", str(tmp_path / f"f.{kind}"))]
    words = ["--repeats", "1", "--epochs", "1", "--max-steps", "12", "--batch-size", "32", "--device", "cpu", *files]
    assert main(["lenet", "fused", "--out", str(tmp_path), *words]) == 0
    rows = pd.read_csv(tmp_path / "f.csv").set_index(["net", "way"])
    assert len(rows) == 12
    assert (rows[["forward_s", "backward_s"]] > 0).all(axis=None)
    for net in rows.index.unique("net"):
        plain, fused = rows.loc[net, "CPU"], rows.loc[net, "CPU, fused"]
        assert fused.loss_first == pytest.approx(plain.loss_first, rel=1e-6)
        assert fused.loss_last == pytest.approx(plain.loss_last, rel=1e-3)
        # A deep plain net needs more steps.
        assert fused.loss_last < fused.loss_first or "10" in net
    assert rows.loc["conv2_shared", "CPU"].accuracy == rows.loc["conv2_independent", "CPU"].accuracy
    said = capsys.readouterr().out
    assert "report D: 10 layers" in said
    assert "220.32" in (tmp_path / "f.md").read_text()
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
