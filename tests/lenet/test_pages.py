"""Pages show the tables that commands write from the committed rows, and no number that no CSV has."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gptscale.launchers.cli import main
from gptscale.lenet.minigrad import report
from gptscale.lenet.run.columns import CONFIGURATION, WORK

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "results" / "measured"
# Without the log, which tells of each day, and the report, which is made from all CSVs.
ROOMS = [ROOT / "docs" / room for room in ("lenet", "ops", "measurements", "guides")]
PAGES = [file for room in ROOMS for file in sorted(room.glob("*.md")) if file.stem not in ("LOG", "report")]
# How tables begin that measure nothing, those of the operators' checks, which their own tests measure again, and those with
# differences and ratios of runs, which the test of the studies makes again. Then formulas, predictions, what others published,
# and times of a day whose command the chapter or the log has.
NOT_READ = """preset | epochs;label;name | P(x);variant | dtype;| ours against;run | median step;net | way
run, CPU;batch 8, 20;recipe | state;recipe | needed;recipe | median;recipe | checkpointing | moments | `;column | unit;count |
what |;part | before;part | now;family |;`--model` |;your program uses;tokens a step;`--optimizer-state`;| fp32
`--optimizer` | products;ranks | one;Llama 3.1 8B;fine-tune;run | state of a rank;| measured;| eager;| published;model | published
model, tokens;| take;program,;record |;met in |;| allocated;rows |""".replace("\n", ";").split(";")
# Rows of reports, and of differences.
NOT_OURS = ("| report ", "| exercise", "| fp8 - ", "| bf16 - ")
# Seconds for the GiB sent on a page are of two links.
LINKS = {"long-sequences": (2**30 / 337.5e6, 2**30 / 35e6)}
# Columns that tell the rows of a CSV apart, where a table has medians of them.
NAMES = "variant net way gelu model contender pool_backward epoch operator what part".split()
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*\.\d+(?:e-\d+)?(?![\w.])")
# Page, command, the files of its rows in results/measured, and the beginnings of the tables that the page shows.
ALL = ("|",)
PRESETS = ",".join(f"2026-11-23-lenet-baseline-{preset}" for preset in ("text", "report-a", "report-a-002"))
SGD = "2026-11-26-lenet-baseline-report-a,2026-11-26-lenet-baseline-report-a-sgd"
TABLES = (
    ("backend", "backend", "2026-11-21-cpu-lenet-backend", ALL),
    ("baseline", "baseline", PRESETS, ALL),
    ("batch", "batch", "2026-11-21-cpu-lenet-batch", ALL),
    ("batch", "batch", "2026-11-27-cpu-lenet-batch-curves", ALL),
    ("baseline", "baseline", SGD, ("| run | epochs", "| run | accuracy %")),
    ("baseline", "baseline", "2026-11-28-lenet-baseline-fast,2026-11-28-lenet-baseline-best", ("| run | accuracy %",)),
    ("fused", "fused", "2026-11-21-cpu-lenet-fused", ALL),
    ("fused", "fused", "2026-11-26-cpu-lenet-fused-sgd", ALL),
    ("precision", "precision", "2026-11-21-cpu-lenet-precision", ALL),
    ("precision", "precision", "2026-11-23-cpu-lenet-precision-digits", ALL),
    ("precision", "precision", "2026-11-23-cpu-lenet-precision-vgg19-quarter", ALL),
    ("strategies", "strategies", "2026-11-23-cpu-lenet-strategies", ("| run | processes |", "| run | median step")),
    ("strategies", "strategies", "2026-11-27-cpu-lenet-strategies-curves", ("| run | p", "| run | e", "| run | 0 |")),
    ("workers", "workers", "2026-11-21-cpu-lenet-workers", ALL),
)


@pytest.mark.parametrize(("page", "command", "rows", "shown"), TABLES, ids=[rows for _, _, rows, _ in TABLES])
def test_a_page_has_the_tables_of_its_rows(page, command, rows, shown, tmp_path, undrawn):
    files, md = [ROOT / "results" / "measured" / f"{name}.csv" for name in rows.split(",")], tmp_path / "tables.md"
    words = ["--rows", ",".join(map(str, files)), "--md", str(md), "--png", str(tmp_path / "figure.png")]
    assert main(["lenet", command, *words]) == 0
    text = (ROOT / "docs" / "lenet" / f"{page}.md").read_text()
    tables = [block.strip() for block in md.read_text().split("\n\n") if block.startswith(shown)]
    assert len(tables) >= len(shown)
    assert [table for table in tables if table not in text] == []
    assert [file.name for file in files if file.name not in text] == []


@pytest.mark.parametrize("page", "backend baseline batch fused memory precision strategies workers".split())
def test_every_page_lays_a_reports_figures_beside_ours(page):
    rows = re.findall(r"(?m)^\| report .*", (ROOT / "docs" / "lenet" / f"{page}.md").read_text())
    assert rows
    cells = [cell.strip(" -").replace(".", "").replace(",", "") for row in rows for cell in row.split("|")]
    # Report C, on precision, gave curves without figures.
    assert any(map(str.isdigit, cells)) == (page != "precision")


def test_the_rate_alone_tells_onecycle_from_text():
    """The page says this, and that every seed of onecycle is above every seed of text."""
    onecycle = pd.read_csv(MEASURED / "2026-11-21-lenet-baseline-mnist.csv")
    text = pd.read_csv(MEASURED / "2026-11-23-lenet-baseline-text.csv")
    assert list(onecycle.seed) == list(text.seed) == [1, 2, 3]
    # the same weights and the same first batch
    assert list(onecycle.loss_first) == list(text.loss_first)
    work = [name for name in (*WORK, *CONFIGURATION) if name in onecycle]
    assert [name for name in work if set(onecycle[name].dropna()) != set(text[name].dropna())] == ["lr", "lr_schedule"]
    assert onecycle.test_accuracy.min() > text.test_accuracy.max()


def tables(page):
    """Yield each table of a page with a decimal number, and the text of its chapter."""
    for chapter in re.split(r"(?m)^## ", page.read_text()):
        yield from ((block, chapter) for block in chapter.split("\n\n") if re.match(r"(?s)\|.*\d\.\d", block))


@cache
def numbers_of(csv):
    """Return all numbers of a CSV, and their medians, lowest and highest over the rows of each name."""
    frame = pd.read_csv(csv, low_memory=False)
    if "class_accuracy" in frame:
        frame = frame.join(frame.class_accuracy.str.split(expand=True).apply(pd.to_numeric, errors="coerce"))
    if "live_bytes" in frame:
        # An account of memory: what each category holds after each event, in MiB.
        frame = frame.groupby("category").change_bytes.cumsum().to_frame().join(frame.live_bytes) / 2**20
    names, values = [name for name in NAMES if name in frame], frame.select_dtypes("number")
    groups = [frame.groupby(by, dropna=False)[[*values.columns.difference(by)]] for by in (names, names[:1]) if by]
    found, run = [values], ["optimizer_state", "seed"]
    if {*run, "step"} <= {*frame}:
        # Means of the last 50 steps, each of which has a row.
        found.append(frame.groupby(run).tail(50).groupby(run)[["loss"]].mean())
    found += [*(getattr(group, word)() for group in groups for word in ("median", "min", "max"))]
    numbers = np.concatenate([part.to_numpy(float).ravel() for part in found])
    return np.unique(numbers[~np.isnan(numbers)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_number_of_a_table_is_in_the_csv_that_it_names(page):
    """Figures of reports stand beside it, and a ratio is one of two numbers of its row."""
    figures = report.report_figures()
    theirs = [*figures.select_dtypes("number").to_numpy().ravel(), *report.REPORT_LOOP, *report.REPORT_KERNEL]
    theirs += list(figures.groupby("model").epoch_time_s.median())
    for table, chapter in tables(page):
        if table.removeprefix("| ").startswith((*NOT_READ,)):
            continue
        named = {MEASURED / name for name in re.findall(r"[\w.-]+\.csv", chapter)}
        files = [file for csv in named for file in [csv, *MEASURED.glob(f"{csv.stem}-*.csv")] if file.is_file()]
        assert files, f"{page.name}: the chapter of this table names no CSV\n{table[:200]}"
        scaled = [numbers_of(csv) * scale for csv in files for scale in (1, 100, 1000, 1e-3, *LINKS.get(page.stem, ()))]
        known = np.concatenate([*scaled, *(np.array(theirs) * scale for scale in (1, 100, 1000))])
        ours = [row for row in table.splitlines()[2:] if not row.startswith(NOT_OURS)]
        for line, number in ((row, found) for row in ours for found in re.findall(NUMBER, row)):
            mantissa, _, power = number.replace(",", "").partition("e")
            value, unit = float(number.replace(",", "")), 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
            # The CSVs have six digits: a last one of 5 may come from above or from below.
            assert np.abs(known - value).min() <= unit / 2 + 2e-9 * value, f"{page.name}: no CSV has {number}: {line}"
