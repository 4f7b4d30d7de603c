"""One way to print a table, to write it as Markdown or LaTeX, and to make a figure.

rich, pandas and matplotlib are imported when a function needs them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType
    from rich.table import Table

# Dots per inch of every picture.
DPI = 110
# Kinds of pictures that a figure is written as.
PICTURES = ("png", "svg", "pdf")

# Shares of a rank's time in a verdict: colour and meaning. Computation is blue and green, waiting is warm.
SHARES = {
    "data": ("#D55E00", "waiting for the next batch"), "host": ("#BBBBBB", "Python, autograd and launches"),
    "transfer": ("#CC79A7", "exchange between ranks that nothing hides"),
    "late rank": ("#E69F00", "waiting for a rank that comes late"),
    "bubble": ("#F0E442", "waiting for another stage of the pipeline"),
    "disk": ("#882255", "waiting for the disk of an offload"), "bus": ("#AA4499", "copies between host and device"),
    "allocator": ("#661100", "freeing memory and asking for it"),
    "no processor": ("#DDCC77", "other programs have the processor"),
    "slower than calibrated": ("#999999", "products that took longer than they were calibrated"),
    "products": ("#0072B2", "matrix products"), "attention": ("#56B4E9", "attention"),
    "elementwise": ("#009E73", "norms, activations, loss and all other kernels"),
    "optimizer": ("#117733", "the optimizer's step"),
}  # fmt: skip


def console(log_columns: int | None = None, **options: Any) -> Console:
    """Return a console as wide as the terminal, or `log_columns` wide where output is no terminal.

    options: of rich's Console, such as highlight=False, which prints numbers without colours. Brackets are no markup, since
    advice has them: pip install 'gptscale[hf]'.
    """
    from rich.console import Console

    return Console(width=None if Console().is_terminal else log_columns, **{"markup": False} | options)


def table(
    titles: Sequence[str],
    rows: Iterable[Iterable[RenderableType]] = (),
    *,
    left: Collection[str] | None = None,
    no_wrap: Collection[str] = (),
    **options: Any,
) -> Table:
    """Return a table, to be printed by a console.

    Its `add_row` appends more rows.
    left: titles of the columns of words, which are flush left; all others hold figures and are flush right. None: all are left.
    no_wrap: titles of columns whose text stays on one line. options: of rich's Table, such as title.
    """
    from rich.table import Table

    result = Table(**{"box": None, "pad_edge": False, "title_justify": "left"} | options)
    for title in titles:
        is_left = left is None or title in left
        result.add_column(title, justify="left" if is_left else "right", no_wrap=title in no_wrap)
    for row in rows:
        result.add_row(*row)
    return result


def markdown(rows: Sequence[Mapping[str, str]], *, left: Collection[str], notes: Sequence[str] = ()) -> str:
    """Return rows whose keys are the titles as a Markdown table, with the notes as a list below it.

    left: titles of the columns that are flush left.
    """
    lines = [list(rows[0]), ["---" if title in left else "---:" for title in rows[0]]]
    lines += [[_plain(text) for text in row.values()] for row in rows]
    text = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    return text + ("\n" + "".join(f"* {_plain(note)}\n" for note in notes) if notes else "")


def booktabs(rows: Sequence[Mapping[str, str]], *, left: Collection[str], notes: Sequence[str] = ()) -> str:
    """Return rows whose keys are the titles as a LaTeX table of the package booktabs, with the notes as comments above it.

    left: titles of the columns that are flush left.
    """
    import pandas as pd

    table = (
        pd.DataFrame(rows).style.hide(axis="index").format(escape="latex").format_index(axis="columns", escape="latex")
    )
    columns = "".join("l" if title in left else "r" for title in rows[0])
    comments = "".join(f"% {' '.join(note.split())}\n" for note in notes)
    return comments + str(table.to_latex(column_format=columns, hrules=True))


def picture_bytes(figure: Figure, kind: str = "png") -> bytes:
    """Return a figure as the bytes of a PNG, SVG or PDF file."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        # The fonts of matplotlib lack some letters that a foreign summary may have.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(file, format=kind, dpi=DPI)
    return file.getvalue()


def subplots(
    n_rows: int,
    n_columns: int,
    size_in: tuple[float, float],
    title: str = "",
    *,
    title_size: float = 10,
    **options: Any,
) -> tuple[Figure, np.ndarray[Any, Any]]:
    """Return a figure and its axes as an array of (n_rows, n_columns), to be drawn on and saved.

    Write it by `figure.savefig(path, dpi=DPI)`. There is nothing to close and no display is needed, since this is not pyplot.
    size_in: width and height in inches. options: of matplotlib's Figure.subplots, such as sharey.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=title_size)
    return figure, figure.subplots(n_rows, n_columns, squeeze=False, **options)


def legend_below(axis: Axes, columns: int = 4) -> None:
    """Put the legend of an axis below it, with each label once."""
    first: dict[str, Any] = {}
    for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
        first.setdefault(label, handle)
    # In letters: the numbers at the axis stand above it, and below them what they are.
    room: dict[str, Any] = {"bbox_to_anchor": (0.5, 0), "borderaxespad": 4.2 if axis.get_xlabel() else 2.4}
    axis.legend(
        first.values(), first, ncols=columns, frameon=False, fontsize=8, columnspacing=1, loc="upper center", **room
    )


def _plain(text: str) -> str:
    """Return text that neither ends a cell nor becomes a tag or a link."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
