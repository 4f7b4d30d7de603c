"""Tables for a terminal, for Markdown and for LaTeX."""

import io

from rich.console import Console

from gptscale.results.render import booktabs, console, markdown, table

ROWS = [{"way": "plain", "ms": "1.5"}, {"way": "a|b <i>", "ms": "20.5"}]


def test_words_are_flush_left_and_figures_flush_right():
    terminal = Console(width=60, file=io.StringIO())
    terminal.print(table(list(ROWS[0]), [row.values() for row in ROWS], left=("way",), title="times"))
    lines = terminal.file.getvalue().splitlines()
    assert [line.split() for line in lines] == [["times"], ["way", "ms"], ["plain", "1.5"], ["a|b", "<i>", "20.5"]]
    assert lines[2].rstrip().endswith(" 1.5")
    assert len(lines[2].rstrip()) == len(lines[3].rstrip())


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
