"""The rows of summaries by columns: every column has a place, and a table has each run once."""

import math

import numpy as np
import pandas as pd
import pytest

from gptscale.results.columns import SUMMARY
from gptscale.results.comparison.rows import FIGURES, INTEGERS, NUMBERS, TEXT, SummaryRows
from gptscale.results.comparison.run_files import TEXT_MAX


def block(*rows):
    """The columns of rows, of which each names what is not empty."""
    columns = {name: np.array([row.get(name, "") for row in rows], dtype=object) for name in (*TEXT, "folder")}
    return columns | {name: np.array([row.get(name, math.nan) for row in rows]) for name in NUMBERS}


def test_a_column_is_a_text_or_a_number_and_what_is_shown_is_one_of_them():
    assert sorted([*TEXT, *NUMBERS]) == sorted(SUMMARY.names)
    assert set(INTEGERS) | set(FIGURES) <= set(NUMBERS)


def test_of_a_run_that_was_resumed_the_last_row_counts_also_across_blocks():
    rows = SummaryRows()
    rows.add(block({"folder": "a", "run_id": "r", "steps": 5}, {"folder": "b", "run_id": "r", "steps": 7}))
    rows.add(block({"folder": "a", "run_id": "r", "steps": 9}))
    assert len(rows) == 3
    frame = rows.frame()
    assert frame[["folder", "run_id", "steps"]].to_numpy().tolist() == [["b", "r", 7], ["a", "r", 9]]


def test_an_empty_number_is_no_figure_and_an_integer_of_0():
    rows = SummaryRows()
    rows.add(block({"run_id": "r", "mfu": 0.5}))
    (row,) = rows.frame().to_dict("records")
    assert (row["mfu"], row["tp_size"]) == (0.5, 0)
    assert math.isnan(row["tokens_per_s"])


def test_a_version_without_the_column_kept_its_moments_in_fp32():
    rows = SummaryRows()
    rows.add(block({"run_id": "old"}, {"run_id": "new", "optimizer_state": "8bit"}))
    assert list(rows.frame().optimizer_state) == ["fp32", "8bit"]


@pytest.mark.parametrize("column", ["run_id", "error", "recipe", "host"])
def test_a_text_is_printable_and_of_bounded_length(column):
    rows = SummaryRows()
    rows.add(block({column: "\x1b[31m" + "x" * 1000}, {column: "\u202ered"}))
    for shown in rows.frame()[column]:
        assert shown.isprintable()
        assert len(shown) <= TEXT_MAX


def test_equal_texts_are_one_category():
    rows = SummaryRows()
    for _ in range(3):
        rows.add(block({"run_id": "a", "recipe": "ddp"}, {"run_id": "b", "recipe": "fsdp"}))
    recipes = rows.frame().recipe
    assert isinstance(recipes.dtype, pd.CategoricalDtype)
    assert list(recipes.cat.categories) == ["ddp", "fsdp"]


def test_no_rows_are_an_empty_table():
    assert SummaryRows().frame().empty
