"""Tests of `gptscale lenet report`: its committed page is what the rows give, and what is missing is said in place."""

import re
from pathlib import Path

import pandas as pd
import pytest

from gptscale.launchers.cli import main
from gptscale.lenet.comparison.answers import Line
from gptscale.lenet.run.columns import LENET
from gptscale.results.record.files import append_row

ROOT = Path(__file__).parents[3]
RUN = {"run_id": "one", "timestamp": "2026-01-01T00:00:00Z", "status": "ok", "study": "baseline", "variant": "text"}
RUN |= {"model": "lenet", "data": "digits", "n_train": 1348, "n_test": 449, "epochs": 2, "steps": 84, "batch_size": 32}
RUN |= {"test_accuracy": 0.9919, "train_time_s": 4.0, "device": "cpu: mine"}
RUN["class_accuracy"] = " ".join(["0.9900"] * 10)


def pages(tmp_path, results):
    assert main(["lenet", "report", "--results", str(results), "--out", str(tmp_path / "out")]) == 0
    html, md = ((tmp_path / "out" / f"report.{kind}").read_text() for kind in ("html", "md"))
    return html, md


def test_the_committed_page_is_what_the_committed_rows_give(tmp_path):
    html, md = pages(tmp_path, ROOT / "results" / "measured")
    committed = (ROOT / "docs" / "lenet" / "report.md").read_text()
    assert md == committed, "gptscale lenet report --out docs/lenet writes it anew"
    # Each table has its command and its CSV. One without a CSV waits in each cell.
    for table in md.split("\n### ")[1:]:
        assert "\n    gptscale " in table or "\n    python -m benchmarks." in table
        assert "\nCSV: `" in table or table.count("waits for") == table.count("\n| ") - 2
    assert "Missing: " not in md
    assert html.count('<img alt="') == html.count("data:image/png;base64,iVBOR") >= 8
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html)


def test_own_rows_stand_in_the_page_and_all_else_is_missing_in_its_place(tmp_path):
    append_row(LENET, tmp_path, RUN)
    html, md = pages(tmp_path, tmp_path)
    assert "| report B: RandomAffine: accuracy % | 99.19 | 99.19 | 1.00 |" in md
    # 1,348 images in 84 steps of 32 took 4 seconds: almost two epochs.
    assert "| report B: RandomAffine: s an epoch | 7.32 | 2.01 | 0.27 |" in md
    assert "| report A: Adam .001, 2080 Ti: accuracy % | 99.02 | no such run | - |" in md
    assert "Missing: there is no 2026-11-21-cpu-lenet-workers.csv" in md
    assert "| digit 7 | 99.42 | 99.00 | 1.00 |" in md
    assert "cpu: mine" in html


@pytest.mark.parametrize("text", ["", "not,a,table\n1,2,3\n", "\0\xff"])
def test_a_page_is_made_of_a_folder_without_a_study_or_with_a_damaged_one(tmp_path, text):
    (tmp_path / "lenet.csv").write_text(text)
    (tmp_path / "fused.csv").write_text(text)
    html, md = pages(tmp_path, tmp_path)
    assert md.count("\nMissing: ") > 20
    # The old figures are there all the same.
    assert "| report D: 10 layers CPU: accuracy % | 11.35 | no such run | - |" in md
    assert 'class="missing"' in html


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["lenet", "report", "--results", str(tmp_path / "gone")]) == 2
    assert "is no folder, in --results, give a results folder" in capsys.readouterr().err


def test_a_line_has_the_median_the_spread_and_the_ratio():
    frame = pd.DataFrame({"way": ["a", "a", "a", "b"], "loss": [0.1, 0.2, 0.9, 5.0]})
    line = Line("loss", 0.4, ("loss", 10.0, ".1f"), {"way": "a"}).cells(frame)
    assert line == {"what": "loss", "old": "0.4", "ours": "2.0 (1.0-9.0)", "ours / old": "5.00"}
    waits = Line("loss", "-", ("loss", 1.0, ".1f"), {"way": "c"}, "waits for a GPU").cells(frame)
    assert list(waits.values()) == ["loss", "-", "waits for a GPU", "-"]
    assert Line("loss", 0.4, ("gone", 1.0, ".1f"), {}).cells(frame)["ours"] == "no such run"
