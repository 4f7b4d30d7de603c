"""The pages of the studies show the tables that the studies write from the committed rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from gptscale.launchers.cli import main
from gptscale.lenet.run.columns import CONFIGURATION, WORK

ROOT = Path(__file__).parents[2]
# Page, command, the files of its rows in results/measured, and the beginnings of the tables that the page shows.
ALL = ("|",)
PRESETS = ",".join(f"2026-11-23-lenet-baseline-{preset}" for preset in ("text", "report-a", "report-a-002"))
SGD = "2026-11-26-lenet-baseline-report-a,2026-11-26-lenet-baseline-report-a-sgd"
TABLES = (
    ("backend", "backend", "2026-11-21-cpu-lenet-backend", ALL),
    ("baseline", "baseline", PRESETS, ALL),
    ("batch", "batch", "2026-11-21-cpu-lenet-batch", ALL),
    ("batch", "batch", "2026-11-23-cpu-lenet-batch-curves", ALL),
    ("baseline", "baseline", SGD, ("| run | epochs", "| run | accuracy %")),
    ("fused", "fused", "2026-11-21-cpu-lenet-fused", ALL),
    ("precision", "precision", "2026-11-21-cpu-lenet-precision", ALL),
    ("precision", "precision", "2026-11-23-cpu-lenet-precision-digits", ALL),
    ("precision", "precision", "2026-11-23-cpu-lenet-precision-vgg19-quarter", ALL),
    ("strategies", "strategies", "2026-11-23-cpu-lenet-strategies", ("| run | processes |", "| run | median step")),
    ("strategies", "strategies", "2026-11-23-cpu-lenet-strategies-curves", ("| run | epoch 1", "| run | 0 |")),
    ("workers", "workers", "2026-11-21-cpu-lenet-workers", ALL),
)


@pytest.mark.parametrize(("page", "command", "rows", "shown"), TABLES, ids=[rows for _, _, rows, _ in TABLES])
def test_a_page_has_the_tables_of_its_rows(
    page: str, command: str, rows: str, shown: tuple[str, ...], tmp_path: Path
) -> None:
    files, md = [ROOT / "results" / "measured" / f"{name}.csv" for name in rows.split(",")], tmp_path / "tables.md"
    words = ["--rows", ",".join(map(str, files)), "--md", str(md), "--png", str(tmp_path / "figure.png")]
    assert main(["lenet", command, *words]) == 0
    text = (ROOT / "docs" / "lenet" / f"{page}.md").read_text()
    tables = [block.strip() for block in md.read_text().split("\n\n") if block.startswith(shown)]
    assert len(tables) >= len(shown)
    assert [table for table in tables if table not in text] == []
    assert [file.name for file in files if file.name not in text] == []


@pytest.mark.parametrize(
    "page", ["backend", "baseline", "batch", "fused", "memory", "precision", "strategies", "workers"]
)
def test_every_page_lays_a_reports_figures_beside_ours(page: str) -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "lenet" / f"{page}.md").read_text().splitlines()
        if line.startswith("| report ")
    ]
    assert rows
    # Report C, on precision, gave curves without figures.
    assert any(
        any(cell.strip(" |-").replace(".", "").replace(",", "").isdigit() for cell in row.split("|")) for row in rows
    ) == (page != "precision")


def test_the_rate_alone_tells_onecycle_from_text() -> None:
    """The page says this, and that every seed of onecycle is above every seed of text."""
    folder = ROOT / "results" / "measured"
    onecycle = pd.read_csv(folder / "2026-11-21-lenet-baseline-mnist.csv")
    text = pd.read_csv(folder / "2026-11-23-lenet-baseline-text.csv")
    assert list(onecycle.seed) == list(text.seed) == [1, 2, 3]
    # the same weights and the same first batch
    assert list(onecycle.loss_first) == list(text.loss_first)
    work = [name for name in (*WORK, *CONFIGURATION) if name in onecycle]
    assert [name for name in work if set(onecycle[name].dropna()) != set(text[name].dropna())] == ["lr", "lr_schedule"]
    assert onecycle.test_accuracy.min() > text.test_accuracy.max()
