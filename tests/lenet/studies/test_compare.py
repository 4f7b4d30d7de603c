"""Tests of `gptscale compare` on vision runs, with rows that no run had to make."""

from pathlib import Path

import pytest

from gptscale.common.errors import ConfigError
from gptscale.launchers.commands.compare import main
from gptscale.lenet.run.columns import LENET
from gptscale.lenet.studies.compare import compare, load, read_epochs
from gptscale.results.record.files import append_row

RUN = {"status": "ok", "model": "lenet", "data": "digits", "n_params": 61706, "n_train": 1348, "n_test": 449}
RUN |= {"image_size": 28, "batch_size": 32, "epochs": 2, "steps": 84, "precision": "fp32", "loader": "fast"}
RUN |= {"world_size": 1, "test_accuracy": 0.9, "images_per_s": 5000.0, "train_time_s": 1.0, "peak_rss_gib": 0.8}
RUN |= {"timestamp": "2026-01-01T00:00:00Z"}


def left(folder, name, **cells):
    """Leave a row, and the epochs that a run of this name would have."""
    row = RUN | {"run_id": name} | cells
    append_row(LENET, folder, row)
    epochs = folder / "runs" / name / "epochs.csv"
    epochs.parent.mkdir(parents=True)
    epochs.write_text(f"epoch,train_loss,test_accuracy\n1,2.0,0.5\n2,1.0,{row['test_accuracy']}\n")


@pytest.fixture
def folder(tmp_path):
    for seed, accuracy in ((1, 0.90), (2, 0.94)):
        # The second is as of a version without this column.
        left(tmp_path, f"full{seed}", seed=seed, test_accuracy=accuracy, momentum=0.9 if seed == 1 else "")
        other = {"test_accuracy": accuracy - 0.01, "precision": "bf16", "images_per_s": 9000.0 + seed}
        left(tmp_path, f"half{seed}", seed=seed, **other)
    return tmp_path


def test_repeats_are_one_line_and_the_best_accuracy_is_first(folder):
    comparison = compare(load([folder]))
    counts = {name: len(rows) for name, rows in comparison.ranked.items()}
    assert counts == {"lenet precision=fp32": 2, "lenet precision=bf16": 2}
    assert list(comparison.ranked)[0] == "lenet precision=fp32"
    assert "accuracy %: lenet precision=fp32 and lenet precision=bf16 are not told apart" in comparison.notes
    assert not any("images/s" in note for note in comparison.notes)


def test_other_work_and_failed_runs_are_said_and_not_ranked(folder):
    left(folder, "longer", epochs=3, test_accuracy=0.99)
    left(folder, "other images", data_fingerprint="b", test_accuracy=0.99)
    left(folder, "no repeat", momentum=0.0)
    left(folder, "broken", status="failed", error="loss nan", test_accuracy=0.0)
    comparison = compare(load([folder]))
    assert sorted(len(rows) for rows in comparison.ranked.values()) == [1, 2, 2]
    assert any("epochs 3 (ranked: 2)" in note for note in comparison.notes)
    assert any("data_fingerprint b (ranked: )" in note for note in comparison.notes)
    assert any("broken: failed, loss nan" in note for note in comparison.notes)


def test_the_command_writes_its_files_for_several_folders(folder, capsys):
    left(folder / "more", "other", seed=3, test_accuracy=0.95)
    files = {kind: folder / f"c.{kind}" for kind in ("csv", "md", "png")}
    words = [str(folder), str((folder / "more" / "lenet.csv").rename(folder / "kept.csv"))]
    assert main([*words, *(word for kind, file in files.items() for word in (f"--{kind}", str(file)))]) == 0
    assert "94.00 (90.00-95.00)" in capsys.readouterr().out
    assert files["md"].read_text().count("| lenet") == 2
    assert files["csv"].read_text().count("\n") == 6
    assert files["png"].read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("words", [["--html", "page.html"], ["another"]])
def test_what_cannot_be_compared_is_refused(folder, words, monkeypatch):
    monkeypatch.chdir(folder)
    Path("another").mkdir()
    Path("another/summary.csv").write_text("")
    with pytest.raises(ConfigError, match="vision runs"):
        main([str(folder), *words])


def test_a_foreign_name_leads_nowhere(folder):
    secret = folder.parent / "epochs.csv"
    secret.write_text("epoch,train_loss,test_accuracy\n1,2,3\n")
    assert read_epochs(str(folder), "../../..") is None
    assert read_epochs(str(folder), "gone") is None
