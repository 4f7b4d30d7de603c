"""Tables for a terminal and for Markdown, and figures without a display."""

import io

from rich.console import Console

from gptscale.results.render import booktabs, console, markdown, picture_bytes, subplots, table

ROWS = [{"way": "plain", "ms": "1.5"}, {"way": "a|b <i>", "ms": "20.5"}]


def printed(what, width=60):
    terminal = Console(width=width, file=io.StringIO())
    terminal.print(what)
    return terminal.file.getvalue().splitlines()


def test_words_are_flush_left_and_figures_flush_right():
    rows = [row.values() for row in ROWS]
    lines = printed(table(list(ROWS[0]), rows, left=("way",), title="times"))
    assert [line.split() for line in lines] == [["times"], ["way", "ms"], ["plain", "1.5"], ["a|b", "<i>", "20.5"]]
    assert lines[2].rstrip().endswith(" 1.5")
    assert len(lines[2].rstrip()) == len(lines[3].rstrip())


def test_columns_that_may_not_wrap_do_not():
    lines = printed(table(("name", "why"), [("a-name-of-some-length", "words " * 10)], no_wrap=("name",)), width=40)
    assert len(lines) > 2
    assert "a-name-of-some-length" in lines[1]


def test_a_console_without_a_terminal_has_the_width_asked_for(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert console(123).width == 123


def test_markdown_cells_neither_end_early_nor_become_tags_or_links():
    assert markdown(ROWS, left=("way",), notes=["a < b", "[x](https://x)"]).splitlines() == [
        "| way | ms |",
        "| --- | ---: |",
        "| plain | 1.5 |",
        "| a\\|b &lt;i> | 20.5 |",
        "",
        "* a &lt; b",
        "* [x]\\(https://x)",
    ]
    assert markdown(ROWS[:1], left=("way",)).endswith("| plain | 1.5 |\n")


def test_a_cell_of_latex_is_printed_as_it_is():
    rows = [{"way": r"a_b & c\d", "share": "5 %"}]
    assert booktabs(rows, left=("way",), notes=["two\nlines"]).splitlines() == [
        "% two lines",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"way & share \\",
        r"\midrule",
        r"a\_b \& c\textbackslash d & 5 \% \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_a_figure_is_written_without_a_display():
    figure, axes = subplots(1, 2, (4, 2), "title")
    assert axes.shape == (1, 2)
    axes[0, 0].plot([1, 2])
    assert picture_bytes(figure).startswith(b"\x89PNG")
